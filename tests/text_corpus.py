"""Small texts for tests: made of few words, all different, so that they can be told apart and learned from."""

import json
import random

WORDS = "the a code head key query value of mixes reads sums network layer token is and small large old new".split()


def documents(count, words=12):
    """Documents that are all different."""
    drawn = random.Random(0)
    return [
        f"{number}: " + " ".join(drawn.choices(WORDS, k=drawn.randint(1, 2 * words))) + ".\n" for number in range(count)
    ]


def write_corpus(folder, count):
    """A folder with one file of JSON lines."""
    folder.mkdir(parents=True)
    lines = [json.dumps({"text": text}) + "\n" for text in documents(count)]
    (folder / "documents.jsonl").write_text("".join(lines))
    return folder
