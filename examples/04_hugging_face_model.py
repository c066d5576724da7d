"""A HYLA language model of our own for Hugging Face, and one that starts from the weights of a Llama."""

import tempfile
import warnings

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hyla.models.causal_lm import HylaConfig, HylaForCausalLM, from_softmax

torch.manual_seed(0)
config = HylaConfig(
    mechanism="hyla",
    vocab_size=50,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    positions="rotary",
    pad_token_id=0,
)
model = HylaForCausalLM(config).eval()
prompts = torch.tensor([[0, 0, 7, 8, 9], [3, 4, 5, 6, 7]])
real = (prompts != 0).long()  # the first prompt is padded on its left
generated = model.generate(prompts, attention_mask=real, max_new_tokens=4, num_beams=2, do_sample=False)
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder)  # importing hyla.models.causal_lm made it known
same = torch.equal(again(prompts).logits, model(prompts).logits)
print("reloaded:", type(again).__name__, again.config.mechanism, "computes the same:", same)

sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
llama = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # that outputs differ, and training is needed
    started = from_softmax(llama, mechanism="hyla")
print("parameters of the Llama and of the model that starts from it:", llama.num_parameters(), started.num_parameters())
