"""The table of ops: ask here for an op by name; its file is imported when it is first asked for."""

from __future__ import annotations

import difflib
import importlib
from types import MappingProxyType

from layerzero.errors import NoKernelFoundError
from layerzero.ops.op import OPS, Op

# The file that defines each op: a call imports its own op's and no other, since the first call waits for it.
FILES = MappingProxyType(
    {
        "add_layer_norm": "norm",
        "add_rms_norm": "norm",
        "add_rms_norm_quantize": "norm_quantize",
        "alibi": "alibi",
        "append_kv": "append",
        "attention": "attention",
        "cross_entropy": "cross_entropy",
        "dequantize": "quantize",
        "embedding": "embedding",
        "layer_norm": "norm",
        "linear": "linear",
        "linear_cross_entropy": "linear_cross_entropy",
        "mla_attention": "mla",
        "mlp": "mlp",
        "moe": "moe",
        "paged_attention": "paged",
        "quantize": "quantize",
        "quantized_linear": "quantized_linear",
        "ragged_attention": "ragged",
        "rms_norm": "norm",
        "rope": "rope",
        "sample": "sampling",
        "sample_topk": "sampling",
        "sample_topp": "sampling",
        "verify_chain": "verify",
        "verify_tree": "verify",
    }
)


def get(name: str) -> Op:
    """The op of that name.

    Raises: NoKernelFoundError: there is none; the message lists the ops, nearest names first.
    """
    found = OPS.get(name)
    if found is not None:
        return found
    if not isinstance(name, str):
        raise TypeError(f"op needs an op's name, got {type(name).__name__}")
    file = FILES.get(name)
    if file is not None:
        importlib.import_module(f"layerzero.ops.{file}")
        return OPS[name]
    known = names()
    close = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise NoKernelFoundError(f"no candidates found: unknown op {name!r}; {hint}ops: {', '.join(known)}")


def names() -> tuple[str, ...]:
    """Every op's name, in alphabetical order."""
    return tuple(sorted({*FILES, *OPS}))
