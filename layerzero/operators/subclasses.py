"""Calls on tensors of subclasses that answer for themselves: jagged ones, distributed ones, a user's.

Plain torch computes them, operator by operator, for which such a subclass has its own rules. Attention has no
such form that jagged or distributed tensors take: of jagged tensors it is `ragged_attention` over their
values, of distributed ones each rank's attention over its own sequences and heads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero._util import foreign
from layerzero.ops.attention.arguments import AttentionArgs
from layerzero.ops.attention.checks import head_axes
from layerzero.ops.op import Args, Op

# Runs an op on plain tensors, by its name.
Run = Callable[[str, dict[str, Any]], Any]


def compose(op: Op, full: Args, run: Run) -> Any:
    """A call some of whose tensors are of a subclass.

    Raises: TypeError: the subclass lacks what the op is made of, or the placements or options do not fit.
    """
    kinds = sorted({type(value).__name__ for value in full if isinstance(value, Tensor)})
    try:
        if op.name == "attention":
            call = AttentionArgs._make(full)
            if call.q.is_nested:
                return _jagged(call, run)
            distributed = sys.modules.get("torch.distributed.tensor")
            if distributed is not None and isinstance(call.q, distributed.DTensor):
                return _local(call, run)
        return op.reference(*full)
    except (NotImplementedError, AttributeError, RuntimeError) as error:
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TypeError(
            f"{op.name} needs tensors for which plain torch can compute it, got {', '.join(kinds)}: {what}"
        ) from error


def _jagged(call: Any, run: Run) -> Tensor:
    """Attention within each of the sequences of jagged tensors (B, H, j, D), or (B, j, H, D) with BSHD."""
    _need_plain(call, "jagged tensors", frozenset({"is_causal", "scale", "window", "softcap"}))
    tokens = head_axes(call.layout)[1]
    q, k = call.q, call.k
    values: dict[str, Tensor] = {}
    for name in ("q", "k", "v"):
        operand = getattr(call, name)
        if not operand.is_nested or operand.layout != torch.jagged or operand.dim() != 4:
            raise TypeError(
                f"{name} needs a jagged tensor of 4 axes beside jagged ones, got {operand.layout}"
            )
        if operand._ragged_idx != tokens:
            raise TypeError(
                f"{name} needs its jagged axis where {call.layout} has tokens, {tokens}, got "
                f"{operand._ragged_idx}"
            )
        if operand.lengths() is not None:
            raise TypeError(f"{name} needs sequences without gaps between them: {name}.contiguous() has none")
        values[name] = operand.values().transpose(0, 1) if tokens == 2 else operand.values()
    ends, others = k.offsets(), call.v.offsets()
    if others is not ends and foreign.has_memory(ends) and not torch.equal(others, ends):
        raise TypeError(
            f"v needs sequences as long as k's, got offsets {others.tolist()} and {ends.tolist()}"
        )
    out = run(
        "ragged_attention",
        values | {
            "cu_seqlens_q": q.offsets(), "cu_seqlens_k": ends, "is_causal": call.is_causal,
            "scale": call.scale, "window": call.window, "softcap": call.softcap,
        },
    )  # fmt: skip
    nested: Tensor = torch.nested.nested_tensor_from_jagged(out, q.offsets())
    return nested.transpose(1, 2) if tokens == 2 else nested


def _local(call: Any, run: Run) -> Tensor:
    """Each rank's attention over the sequences and heads that it holds, as a distributed tensor of theirs."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    allowed = (0, head_axes(call.layout)[0])
    _need_plain(call, "distributed tensors", frozenset({"is_causal", "scale", "window", "softcap", "layout"}))
    q = call.q
    placements = q.placements
    for name in ("q", "k", "v"):
        operand = getattr(call, name)
        if not isinstance(operand, DTensor):
            raise TypeError(f"{name} needs a DTensor like q, got {type(operand).__name__}")
        fits = all(
            p == Replicate() or (isinstance(p, Shard) and p.dim in allowed) for p in operand.placements
        )
        if not fits or operand.placements != placements:
            raise TypeError(
                f"{name} needs to be replicated or sharded along axis {allowed[0]} or {allowed[1]}, like q, "
                f"got {operand.placements}"
            )
    heads, parts = allowed[1], 1
    for placement, size in zip(placements, q.device_mesh.shape, strict=True):
        parts *= size if placement == Shard(heads) else 1
    if q.shape[heads] != call.k.shape[heads] and call.k.shape[heads] % parts:
        # Heads of queries would be on another rank than the keys that they share.
        raise TypeError(
            f"k needs a number of heads that {parts} shards divide, where queries share them, got "
            f"{call.k.shape[heads]}"
        )
    local = call._replace(q=q.to_local(), k=call.k.to_local(), v=call.v.to_local())
    out = run("attention", local._asdict())
    sizes = torch.Size((*q.shape[:3], call.v.shape[3]))
    strides = torch.empty(sizes, device="meta").stride()
    return DTensor.from_local(out.contiguous(), q.device_mesh, placements, shape=sizes, stride=strides)


def _need_plain(call: AttentionArgs, what: str, known: frozenset[str]) -> None:
    """Refuse the options of attention that have no meaning here.

    Raises: TypeError: one is set, by name.
    """
    for name, default in AttentionArgs._field_defaults.items():
        value = getattr(call, name)
        if name not in known | {"layout"} and value is not default and value != default:
            raise TypeError(f"attention of {what} needs no {name}, got {type(value).__name__}")
