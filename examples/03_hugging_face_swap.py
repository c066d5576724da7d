"""HYLA in a Hugging Face model: a Llama, its attention swapped and its weights kept, trained, generating, saved, loaded."""

import tempfile
import warnings

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hyla.models.swap import load_swapped, swap_attention

torch.manual_seed(0)
sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0))

with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # that outputs differ, and training is needed
    swap_attention(model, mechanism="hyla")

ids = (torch.arange(12)[None] + torch.arange(4)[:, None]) % 40 + 3  # counting
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for _ in range(30):
    optimizer.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")

model.eval()
generated = model.generate(ids[:1, :6], max_new_tokens=4, do_sample=False)
print("prompt and continuation:", generated[0].tolist())
codes = model(ids, output_attentions=True).attentions  # one [B, H, Q, K] per layer: the latent codes
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    again = load_swapped(folder)
same = torch.equal(again(ids).logits, model(ids).logits)
print("the saved model computes the same:", same)
