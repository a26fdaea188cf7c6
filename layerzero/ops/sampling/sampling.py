"""Drawing tokens: sample, sample_topk, sample_topp.

`drawing` holds the rule that all three filter by and the generator that all three draw by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layerzero.native import HOT
from layerzero.ops import checks
from layerzero.ops.batching import Rule, join_rows
from layerzero.ops.op import NO_SHAPE, Args, Call, Launch, Op, register, signature_of
from layerzero.ops.sampling.draw import (
    Count,
    Number,
    always,
    column,
    draw,
    likeliest,
    row_seeds,
    signed,
    token_weights,
)
from layerzero.spec.call_spec import OutSpec, Request, Work

HOTTEST = torch.finfo(torch.float64).max
MOST_TOKENS = (1 << 63) - 1


def sample(
    logits: Tensor,
    *,
    temperature: Number = 1.0,
    top_k: Count = 0,
    top_p: Number = 1.0,
    seed: Count | None = None,
    offset: Count = 0,
) -> Call:
    """Draw one token a row, after temperature, top-k and top-p.

    Args: logits (B, V), any float dtype, -inf masks; every other argument is a number or a (B,) tensor.
        temperature 0 takes the largest logit; top_k 0 keeps all; top_p keeps the fewest tokens whose share
        of what top-k left reaches top_p. Among equal logits the lowest index comes first. The same (seed,
        offset) draws the same, of an int the low 64 bits count; one seed for B rows gives each row its own
        stream, the first row's being the seed itself; None takes a seed from torch's default generator when
        the call is made.
    Returns: (B,) int64; -1 for a row of NaN or of nothing but -inf where the device's data is not read.
    Raises: ValueError, TypeError: an argument does not fit, by name; on the CPU also such a row, by index.
    Source: splitmix64: Steele, Lea and Flood, OOPSLA 2014.
    """
    seed = new_seed() if seed is None else seed
    args = (logits, temperature, top_k, top_p, seed, offset)
    try:
        return (
            "sample", logits.shape, logits.stride(), logits.dtype, logits.device,
            _by_value(temperature), _by_value(top_k), _by_value(top_p), by_type(seed), by_type(offset),
        ), args  # fmt: skip
    except NO_SHAPE:
        _check_sample(args)  # names the operand that is no tensor
        raise


def sample_topk(
    logits: Tensor, k: Count, *, temperature: Number = 1.0, seed: Count | None = None, offset: Count = 0
) -> Call:
    """Draw one token a row among its `k` largest logits: `sample` with top_k=k of at least 1."""
    seed = new_seed() if seed is None else seed
    args = (logits, k, temperature, seed, offset)
    try:
        return (
            "sample_topk", logits.shape, logits.stride(), logits.dtype, logits.device,
            _by_value(k), _by_value(temperature), by_type(seed), by_type(offset),
        ), args  # fmt: skip
    except NO_SHAPE:
        _check_topk(args)
        raise


def sample_topp(
    logits: Tensor, p: Number, *, temperature: Number = 1.0, seed: Count | None = None, offset: Count = 0
) -> Call:
    """Draw one token a row among the fewest whose probability reaches `p`: `sample` with top_p=p."""
    seed = new_seed() if seed is None else seed
    args = (logits, p, temperature, seed, offset)
    try:
        return (
            "sample_topp", logits.shape, logits.stride(), logits.dtype, logits.device,
            _by_value(p), _by_value(temperature), by_type(seed), by_type(offset),
        ), args  # fmt: skip
    except NO_SHAPE:
        _check_topp(args)
        raise


def new_seed() -> int:
    """Drawn in the caller's thread and order, so that `torch.manual_seed` repeats a program's tokens."""
    return int(torch.randint(1 << 62, (), device="cpu"))


def _by_value(value: Any) -> Hashable:
    return signature_of(value) if isinstance(value, Tensor) else (value.__class__, value)


def by_type(value: Any) -> Hashable:
    # Seeds and offsets change with every step and any integer is one: their values decide nothing.
    return signature_of(value) if isinstance(value, Tensor) else value.__class__


# -- checks ---------------------------------------------------------------------------------------------


def _need_share(name: str, value: Any, high: float, logits: Tensor) -> None:
    """`value` is a number in [0, high] or a floating point tensor (B,)."""
    if isinstance(value, Tensor):
        checks.need_vector(name, value, logits.shape[0], "logits' rows")
        checks.need_same_device("logits", logits, **{name: value})
    else:
        checks.need_number(name, value, low=0.0, high=high)


def need_count(name: str, value: Any, span: tuple[int, int] | None, logits: Tensor) -> None:
    """`value` is an int in `span`, or any without one, or an index tensor (B,)."""
    if isinstance(value, Tensor):
        checks.need_index(name, value, rank=1)
        if value.shape[0] != logits.shape[0]:
            got = value.shape[0]
            raise ValueError(f"{name} needs {logits.shape[0]} elements like logits' rows, got {got}")
        checks.need_same_device("logits", logits, **{name: value})
    elif span is None:
        checks.need_whole(name, value)
    else:
        checks.need_int(name, value, low=span[0], high=span[1])


def _request(
    op: str, logits: Any, seed: Any, offset: Any, temperature: Any, asked: frozenset[str] = frozenset()
) -> Request:
    """The request of all three; the caller has checked what is its own, and names what is `asked` beyond."""
    _need_share("temperature", temperature, HOTTEST, logits)
    need_count("seed", seed, None, logits)
    need_count("offset", offset, None, logits)
    return Request(
        op=op,
        platform=logits.device.type,
        device=str(logits.device),
        dtype=checks.dtype_name(logits.dtype),
        dtypes=(checks.dtype_name(logits.dtype),),
        dims={"N": logits.shape[0], "V": logits.shape[1]},
        features=asked | {"seed_per_row"} if isinstance(seed, Tensor) else asked,
        contiguous=logits.is_contiguous(),
        last_stride1=checks.last_stride_is_one([logits]),
        alignment=checks.alignment_of([logits]),
    )


def _need_logits(logits: Any) -> None:
    checks.need_tensor("logits", logits, rank=2)
    checks.need_rows("logits", logits)


def _check_sample(args: Args) -> Request:
    logits, temperature, top_k, top_p, seed, offset = args
    _need_logits(logits)
    need_count("top_k", top_k, (0, MOST_TOKENS), logits)
    _need_share("top_p", top_p, 1.0, logits)
    return _request("sample", logits, seed, offset, temperature, _filters(top_k, top_p))


def _filters(top_k: Any, top_p: Any) -> frozenset[str]:
    """What is to be filtered by; a tensor may hold any number, so it counts as a filter."""
    asked = {"top_k": not always(top_k, 0), "top_p": not always(top_p, 1)}
    asked["top_k_and_top_p"] = all(asked.values())
    return frozenset(name for name, wanted in asked.items() if wanted)


def _check_topk(args: Args) -> Request:
    logits, k, temperature, seed, offset = args
    _need_logits(logits)
    need_count("k", k, (1, MOST_TOKENS), logits)
    return _request("sample_topk", logits, seed, offset, temperature)


def _check_topp(args: Args) -> Request:
    logits, p, temperature, seed, offset = args
    _need_logits(logits)
    _need_share("p", p, 1.0, logits)
    return _request("sample_topp", logits, seed, offset, temperature)


Bounds = dict[str, tuple[float, float]]  # of the arguments behind the logits, in order
_HEAT = (0, HOTTEST)
_SAMPLE: Bounds = {"temperature": _HEAT, "top_k": (0, MOST_TOKENS), "top_p": (0, 1)}
_TOPK: Bounds = {"k": (1, MOST_TOKENS), "temperature": _HEAT}
_TOPP: Bounds = {"p": (0, 1), "temperature": _HEAT}


def _guard_rows(bounds: Bounds, args: Args) -> Args:
    """The arguments behind the logits as copies within their bounds; each row's largest logit is finite."""
    native = HOT.module
    own: Any = None if native is None else native.rows_within(args, bounds)
    return _looked_through(args, bounds) if own is None or own is NotImplemented else own


def _looked_through(args: Args, bounds: Bounds) -> Args:
    logits: Tensor = args[0]
    if logits.shape[0] == 0 or not checks.readable(logits):
        return args
    largest = logits.detach().amax(-1).tolist()
    for row, worst in enumerate(largest):
        if not math.isfinite(worst):
            raise ValueError(f"logits needs a finite largest value in each row, got {worst} in row {row}")
    own = list(args)
    for position, (name, (low, high)) in enumerate(bounds.items(), 1):
        value = args[position]
        if not isinstance(value, Tensor):
            continue
        own[position] = checks.held(value)
        for row, got in enumerate(own[position].tolist()):
            if not low <= got <= high:
                raise ValueError(f"{name} needs values in [{low}, {high}], got {got} in row {row}")
    return tuple(own)


# -- references -----------------------------------------------------------------------------------------


def sample_reference(
    logits: Tensor, temperature: Number, top_k: Count, top_p: Number, seed: Count, offset: Count
) -> Tensor:
    """Filter, then draw; where every row is to be the likeliest there is nothing to weigh."""
    if always(temperature, 0):
        return _drawn(likeliest(logits))
    return _drawn(draw(token_weights(logits, temperature, top_k, top_p), seed, offset))


def _drawn(tokens: Tensor) -> Tensor:
    """The tokens, where each row has one or the device's data is not read; the guard names the row."""
    if tokens.device.type == "cpu" and tokens.numel() and int(tokens.amin()) < 0:
        raise ValueError("logits needs a finite largest value in each row")
    return tokens


def sample_topk_reference(
    logits: Tensor, k: Count, temperature: Number, seed: Count, offset: Count
) -> Tensor:
    """`sample_reference` without top-p."""
    return sample_reference(logits, temperature, k, 1.0, seed, offset)


def sample_topp_reference(
    logits: Tensor, p: Number, temperature: Number, seed: Count, offset: Count
) -> Tensor:
    """`sample_reference` without top-k."""
    return sample_reference(logits, temperature, 0, p, seed, offset)


# -- batching -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SampledRows(Rule):
    """Rows of any callers over one vocabulary: where callers differ, their numbers become (B,) tensors.

    `seed` is the position of the seeds, which always become tensors: a row keeps the stream it has alone.
    `whole` are the positions that hold integers.
    """

    seed: int
    whole: frozenset[int]

    @property
    def rowwise(self) -> bool:
        """Rows do not touch each other."""
        return True

    @property
    def joined(self) -> Container[int]:
        """The logits and every number of the three ops."""
        return range(6)

    def alike(self, args: Args) -> Hashable | None:
        """Dtype, device and vocabulary."""
        logits: Tensor = args[0]
        return (logits.dtype, logits.device, logits.shape[1])

    def size(self, args: Args) -> tuple[int, int]:
        """Rows and bytes of the logits."""
        logits: Tensor = args[0]
        return logits.shape[0], logits.numel() * logits.element_size()

    def run(self, calls: Sequence[Args], launch: Launch) -> list[Any]:
        """One launch over everybody's rows."""
        if len(calls) == 1:
            return [launch(calls[0])]
        merged = list(calls[0])
        merged[0] = join_rows([args[0] for args in calls])
        for position in range(1, len(merged)):
            merged[position] = join_numbers(
                [args[position] for args in calls],
                [args[0] for args in calls],
                seeds=position == self.seed,
                whole=position in self.whole,
            )
        counts = [args[0].shape[0] for args in calls]
        return list(launch(tuple(merged)).split_with_sizes(counts))


def join_numbers(values: Sequence[Any], rows: Sequence[Tensor], *, seeds: bool, whole: bool) -> Any:
    """One argument of several callers for all their `rows`: a number that all share, else a (B,) tensor.

    `seeds` always become a tensor, so that a row keeps the stream it has alone; `whole` numbers are integers.
    """
    counts = [own.shape[0] for own in rows]
    numbers = not any(isinstance(value, Tensor) for value in values)
    device = rows[0].device
    if seeds:
        if not numbers or max(counts) > 1:
            return torch.cat([row_seeds(seed, own) for seed, own in zip(values, rows, strict=True)])
        # A row by itself has the stream of its seed.
        return torch.tensor([signed(seed) for seed in values], device=device)
    if numbers and all(value == values[0] for value in values):
        return values[0]
    dtype = torch.int64 if whole else torch.float64
    if not numbers:
        columns = [column(v, dtype, device).expand(n, 1) for v, n in zip(values, counts, strict=True)]
        return torch.cat(columns).squeeze(-1)
    spread = [signed(v) for v, n in zip(values, counts, strict=True) for _ in range(n)]
    return torch.tensor(spread, dtype=dtype, device=device)


def _outputs(args: Args) -> tuple[OutSpec, ...]:
    return (OutSpec((args[0].shape[0],), "int64"),)


def _empty(args: Args) -> Tensor | None:
    logits = args[0]
    return torch.empty(0, dtype=torch.int64, device=logits.device) if logits.shape[0] == 0 else None


def _work(request: Request) -> Work:
    """Exponentials, sums and comparisons of logits that are read once."""
    n, v = request.dim("N"), request.dim("V")
    return Work(flops=10.0 * n * v, bytes=float(n * v * checks.dtype_bytes(request.dtype) + 8 * n))


def _register(
    build: Callable[..., Call],
    check: Callable[[Args], Request],
    reference: Callable[..., Tensor],
    bounds: Bounds,
    batching: SampledRows,
) -> Op:
    return register(
        Op(
            name=build.__name__,
            build=build,
            check=check,
            reference=reference,
            outputs=_outputs,
            work=_work,
            operands=(0,),
            exact=frozenset({"V"}),
            empty=_empty,
            guard=partial(_guard_rows, bounds),
            guard_joined=True,
            batching=batching,
            differentiable=False,
            stochastic=True,
            wide_outputs=frozenset({0}),
        )
    )


SAMPLE = _register(
    sample, _check_sample, sample_reference, _SAMPLE, SampledRows(seed=4, whole=frozenset({2, 5}))
)
SAMPLE_TOPK = _register(
    sample_topk, _check_topk, sample_topk_reference, _TOPK, SampledRows(seed=3, whole=frozenset({1, 4}))
)
SAMPLE_TOPP = _register(
    sample_topp, _check_topp, sample_topp_reference, _TOPP, SampledRows(seed=3, whole=frozenset({4}))
)
