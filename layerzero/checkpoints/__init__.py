"""Quantized checkpoints of other libraries: read as they lie, checked, and written.

`conventions` says what a folder claims, `readers` turns each convention's tensors into `QuantizedTensor`s,
`checkpoint` is a folder as a mapping, `rounding` rounds a model's weights and says what that costs, `writing`
writes the result as compressed-tensors does, which transformers and vLLM read.
"""

from layerzero.checkpoints.checkpoint import QuantizedCheckpoint as QuantizedCheckpoint
from layerzero.checkpoints.checkpoint import load_quantized as load_quantized
