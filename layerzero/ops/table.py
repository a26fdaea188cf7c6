"""The table of ops, filled by importing the op files; ask here for an op by name."""

from __future__ import annotations

import difflib

import layerzero.ops.alibi
import layerzero.ops.attention
import layerzero.ops.cross_entropy
import layerzero.ops.embedding
import layerzero.ops.linear
import layerzero.ops.mla
import layerzero.ops.mlp
import layerzero.ops.norm
import layerzero.ops.paged
import layerzero.ops.ragged
import layerzero.ops.rope
import layerzero.ops.sampling  # noqa: F401  each import registers its ops
from layerzero.errors import NoKernelFoundError
from layerzero.ops.op import OPS, Op


def get(name: str) -> Op:
    """The op of that name.

    Raises: NoKernelFoundError: there is none; the message lists the ops, nearest names first.
    """
    found = OPS.get(name)
    if found is not None:
        return found
    close = difflib.get_close_matches(name, OPS, n=3)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise NoKernelFoundError(f"no candidates found: unknown op {name!r}; {hint}ops: {', '.join(sorted(OPS))}")


def names() -> tuple[str, ...]:
    """Every op's name, in alphabetical order."""
    return tuple(sorted(OPS))
