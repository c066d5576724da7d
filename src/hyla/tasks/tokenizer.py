"""Byte-level BPE tokenizers (package `tokenizers`): trained on the spot, or given as a file, a folder or a hub's name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, SupportsInt

import numpy as np

from hyla.errors import ConfigError, MissingExtraError, check
from hyla.runs import read_json, write_json

END_OF_TEXT = "<|endoftext|>"  # of tokenizers that are trained here
KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
SMALLEST_VOCABULARY = 257  # every byte, and the end of text
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


def tokenizers_package() -> Any:
    """The package `tokenizers`; MissingExtraError where it is not installed."""
    try:
        import tokenizers
    except ImportError:
        raise MissingExtraError("tokenizers", "text", "task text") from None
    return tokenizers


class TextTokenizer:
    """Text to token ids and back, with one token that stands between documents.

    tokenizer: of package `tokenizers`; its truncation and padding are switched off. end_of_text: the token between
    documents; by default the one that language models' tokenizers usually have. Raises ConfigError where it has none.
    """

    def __init__(self, tokenizer: Any, end_of_text: str | None = None):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # a document that spells out a special token holds text, not that token
        vocabulary = tokenizer.get_vocab()
        found = [name for name in ([end_of_text] if end_of_text else KNOWN_ENDS) if name in vocabulary]
        allowed = f"the tokenizer has no such token; it knows none of {', '.join(KNOWN_ENDS)} either"
        check(bool(found), "task.end_of_text", end_of_text, allowed)
        self._tokenizer = tokenizer
        self.end_of_text, self.end_id = found[0], vocabulary[found[0]]
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, without special tokens around it."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(item.ids, dtype=np.int64) for item in encoded]

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """The text of token ids; ends of texts are shown as they are."""
        return self._tokenizer.decode([int(number) for number in ids], skip_special_tokens=False)

    @property
    def digest(self) -> str:
        """What differs between tokenizers that give other ids."""
        content = self._tokenizer.to_str() + self.end_of_text
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, as :func:`load_tokenizer` and `transformers` read them."""
        write_json(
            folder / TOKENIZER_CONFIG,
            {"tokenizer_class": "TokenizersBackend", "padding_side": "left", **self.special_tokens},
        )
        write_json(folder / TOKENIZER, json.loads(self._tokenizer.to_str()))

    @property
    def special_tokens(self) -> dict[str, str]:
        """Roles of the end-of-text token, as `transformers` names them: it also begins a text and pads."""
        return dict.fromkeys(("bos_token", "eos_token", "pad_token"), self.end_of_text)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens: no text is unknown to it, and decoding gives every text
    back. Raises ConfigError for fewer than 257."""
    package = tokenizers_package()
    check(vocab_size >= SMALLEST_VOCABULARY, "task.vocab_size", vocab_size, f"at least {SMALLEST_VOCABULARY}")
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return TextTokenizer(tokenizer, END_OF_TEXT)


def load_tokenizer(name: str, end_of_text: str | None = None) -> TextTokenizer:
    """The tokenizer of a `tokenizer.json`, of a folder that holds one, or of a model on the hub."""
    package = tokenizers_package()
    path = Path(name)
    try:
        if path.exists():
            file = path / TOKENIZER if path.is_dir() else path
            check(file.exists(), "task.tokenizer", name, f"the folder holds no {TOKENIZER}")
            beside = file.with_name(TOKENIZER_CONFIG)
            if end_of_text is None and beside.exists():
                end_of_text = _text(read_json(beside).get("eos_token"))
            return TextTokenizer(package.Tokenizer.from_file(str(file)), end_of_text)
        local = path.suffix or path.is_absolute() or name.startswith(".")
        check(not local, "task.tokenizer", name, "no such file or folder")
        return TextTokenizer(package.Tokenizer.from_pretrained(name), end_of_text)
    except ConfigError:
        raise
    except Exception as error:  # the package and the hub raise bare exceptions for files and names they cannot read
        reason = (str(error) or type(error).__name__).partition("\n")[0]
        allowed = f"a tokenizer.json, a folder with one, or a model's name on the hub ({reason})"
        raise ConfigError(f"task.tokenizer = {name!r} is not possible: {allowed}") from None


def _text(token: Any) -> str | None:
    """A special token as written in a config: text, or an object that holds it."""
    return token.get("content") if isinstance(token, dict) else token
