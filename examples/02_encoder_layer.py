"""HYLA in code written around torch.nn.TransformerEncoderLayer: the same arguments and the same masks."""

import torch
from torch import nn

from hyla import MultiHeadAttention


class HylaEncoderLayer(nn.TransformerEncoderLayer):
    """As torch's, batch first, with `self_attn` replaced. `nn.TransformerEncoder` stacks it."""

    def __init__(self, d_model: int, nhead: int, *args, mechanism: str = "hyla", **kwargs):
        super().__init__(d_model, nhead, *args, batch_first=True, **kwargs)
        self.self_attn = MultiHeadAttention(d_model, nhead, mechanism=mechanism)
        self.self_attn.batch_first = True  # read by nn.TransformerEncoder

    def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
        x = src
        if self.norm_first:
            x = x + self._attend(self.norm1(x), src_mask, src_key_padding_mask)
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(x + self._attend(x, src_mask, src_key_padding_mask))
        return self.norm2(x + self._ff_block(x))

    def _attend(self, x, mask, padding):
        """torch: True = may NOT attend, or numbers that are added to the scores. hyla: True = may attend, or the same."""
        if mask is not None and mask.dtype == torch.bool:
            mask = ~mask
        key_mask = None if padding is None else padding == 0  # False, or the 0 that nn.TransformerEncoder makes of it
        return self.dropout1(self.self_attn(x, mask=mask, key_mask=key_mask))


torch.manual_seed(0)
# The nested-tensor path of nn.TransformerEncoder is for torch's own attention.
layer = HylaEncoderLayer(32, 4, dim_feedforward=64, dropout=0.0, norm_first=True)
encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False).eval()
x = torch.randn(2, 6, 32)
padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])  # the second sequence has 4 tokens
causal = torch.ones(6, 6).triu(1).bool()  # True = may not attend
padded = encoder(x, mask=causal, src_key_padding_mask=padding)
alone = encoder(x[1:, :4], mask=causal[:4, :4])
print(f"largest difference between a padded sequence and itself alone: {(padded[1, :4] - alone[0]).abs().max():.1e}")
