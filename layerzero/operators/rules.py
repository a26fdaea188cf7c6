"""How an operator answers what is around it: shapes for fake tensors, slices of vmap, casts of autocast."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from layerzero.operators.schema import OperatorSchema
from layerzero.ops.op import WIDENED, Args, Op

# The first operands whose rows may have any axes in front: what vmap maps becomes one of them. All other
# tensors must be the same for every slice. Of attention it joins the sequences.
_LEADING: MappingProxyType[str, tuple[int, ...]] = MappingProxyType(
    {
        "add_layer_norm": (0, 1),
        "add_rms_norm": (0, 1),
        "attention": (0, 1, 2),
        "embedding": (0,),
        "layer_norm": (0,),
        "linear": (0,),
        "mlp": (0,),
        "rms_norm": (0,),
        "rms_norm_linear": (0,),
    }
)
# How many axes an operand of attention has where each sequence has its own.
_PER_SEQUENCE = MappingProxyType({"attn_mask": 4, "alibi_slopes": 2})
# What autocast casts to its own dtype, as torch does the same functions.
_LOWERED = frozenset({"attention", "linear", "mlp", "rms_norm_linear"})


def shapes(op: Op) -> Callable[..., Any]:
    """The outputs of a call as tensors without values, by the op's own rule.

    Arguments whose sizes are known are checked as a real call's are. Where a size is a symbol nothing is
    asked of it, so that one graph serves all sizes and the run itself checks.
    """

    def fake(*args: Any, backend: str | None = None, **named: Any) -> Any:
        if op.stochastic and named.get("seed", 0) is None:
            named["seed"] = 0  # tracing draws nothing
        full = op.build(*args, **named)[1]
        if not _has_symbols(full):
            op.check(full)
        outs = tuple(
            full[0].new_empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in op.outputs(full)
        )
        return outs[0] if len(outs) == 1 else outs

    return fake


def _has_symbols(args: Args) -> bool:
    return any(
        any(type(size) is not int for size in value.shape)
        if isinstance(value, Tensor)
        else isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
        for value in args
    )


def vmap_rule(schema: OperatorSchema, operator: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of `torch.vmap`: the mapped axis joins the rows, or each slice is a call of its own.

    Raises: ValueError: the op changes its arguments. RuntimeError: it draws without a seed, with
        randomness other than "different".
    """
    op, positions = schema.op, _LEADING.get(schema.op.name, ())

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        if op.writes:
            raise ValueError(
                f"{op.name} changes its arguments, and torch.vmap needs an operator that does not"
            )
        mapped = tuple(p for p, dim in enumerate(in_dims) if dim is not None)
        if positions and mapped == positions and not _draws(schema, args):
            rows = [args[p].movedim(in_dims[p], 0) for p in positions]
            if op.name == "attention":
                return _as_sequences(schema, operator, rows, args[len(rows) :])
            result = operator(*rows, *args[len(rows) :])
            return result, (0,) * len(result) if isinstance(result, tuple) else 0
        if _draws(schema, args) and info.randomness != "different":
            raise RuntimeError(
                f"vmap: {op.name} draws from torch's generator: pass a seed, or randomness='different'"
            )
        slices = [
            operator(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        if not isinstance(slices[0], tuple):
            return torch.stack(slices), 0
        return tuple(map(torch.stack, zip(*slices, strict=True))), (0,) * len(slices[0])

    return rule


def _as_sequences(
    schema: OperatorSchema, operator: Callable[..., Any], rows: list[Tensor], rest: Args
) -> tuple[Any, Any]:
    """Attention over the mapped axis and the batch as one axis; a mask or slopes of each sequence repeat."""
    count, batch = rows[0].shape[:2]
    axes = [_PER_SEQUENCE.get(p.name) for p in schema.parameters[len(rows) :]]
    repeated = (
        value.repeat(count, *(1,) * (value.dim() - 1))
        if isinstance(value, Tensor) and value.dim() == dims and value.shape[0] == batch
        else value
        for value, dims in zip(rest, axes, strict=False)
    )
    result = operator(*(r.flatten(0, 1) for r in rows), *repeated)
    if isinstance(result, tuple):
        return tuple(part.unflatten(0, (count, batch)) for part in result), (0,) * len(result)
    return result.unflatten(0, (count, batch)), 0


def _draws(schema: OperatorSchema, args: Args) -> bool:
    """Whether a call takes random numbers of torch's default generator."""
    named = dict(zip((p.name for p in schema.parameters), args, strict=False))  # without defaults at the end
    if schema.op.stochastic:
        return named.get("seed") is None and named.get("seed_rows") is None
    return bool(named.get("dropout_p", 0.0) > 0)


def autocast(op: Op, operator: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The operator under `torch.autocast`: its floating operands cast once, then without autocast."""
    is_lowered, fixed = op.name in _LOWERED, torch.float32 if op.name in WIDENED else None

    def cast(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device) if is_lowered else fixed
        with torch.autocast(device, enabled=False):
            return operator(*(_cast(value, dtype, device) for value in args))

    return cast


def _cast(value: Any, dtype: torch.dtype | None, device: str) -> Any:
    """As torch's autocast: floating tensors of the device, but for float64, which keeps its width."""
    if dtype is None or not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value if value.dtype is torch.float64 or value.device.type != device else value.to(dtype)
