"""The ops, blocking: same names and signatures as the awaitable ones in `layerzero`."""

from __future__ import annotations

from layerzero.api.calls import blocking
from layerzero.ops import table as _table

add_layer_norm = blocking(_table.get("add_layer_norm"))
add_rms_norm = blocking(_table.get("add_rms_norm"))
alibi = blocking(_table.get("alibi"))
attention = blocking(_table.get("attention"))
cross_entropy = blocking(_table.get("cross_entropy"))
embedding = blocking(_table.get("embedding"))
layer_norm = blocking(_table.get("layer_norm"))
linear = blocking(_table.get("linear"))
mla_attention = blocking(_table.get("mla_attention"))
mlp = blocking(_table.get("mlp"))
paged_attention = blocking(_table.get("paged_attention"))
ragged_attention = blocking(_table.get("ragged_attention"))
rms_norm = blocking(_table.get("rms_norm"))
rope = blocking(_table.get("rope"))
sample = blocking(_table.get("sample"))
sample_topk = blocking(_table.get("sample_topk"))
sample_topp = blocking(_table.get("sample_topp"))

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "alibi",
    "attention",
    "cross_entropy",
    "embedding",
    "layer_norm",
    "linear",
    "mla_attention",
    "mlp",
    "paged_attention",
    "ragged_attention",
    "rms_norm",
    "rope",
    "sample",
    "sample_topk",
    "sample_topp",
]
