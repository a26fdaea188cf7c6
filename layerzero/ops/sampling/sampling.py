"""Sampling tokens: sample, sample_topk, sample_topp.

`draw` holds the rule that all three filter by and the generator that all three sample with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layerzero.ops import checks
from layerzero.ops.describe import describe, estimate
from layerzero.ops.op import Args, define_op
from layerzero.ops.sampling import draw
from layerzero.ops.sampling.batching import SamplingBatching
from layerzero.ops.sampling.draw import Count, Number, is_constant, new_seed
from layerzero.ops.signature import Build, SignedCall, op_signature, type_key, value_key
from layerzero.spec.call_spec import CallSpec, OutputSpec

MAX_TEMPERATURE = torch.finfo(torch.float64).max
MAX_TOP_K = (1 << 63) - 1


def _sampler(*filters: str) -> Callable[[Build], Build]:
    """The signature of an op that draws: filters and temperature by value, seed and offset by type."""
    key: dict[str | tuple[str, ...], Any] = dict.fromkeys((*filters, "temperature"), value_key)
    return op_signature(default={"seed": new_seed}, key=key | {"seed": type_key, "offset": type_key})


@_sampler("top_k", "top_p")
def sample(
    logits: Tensor,
    *,
    temperature: Number = 1.0,
    top_k: Count = 0,
    top_p: Number = 1.0,
    seed: Count | None = None,
    offset: Count = 0,
) -> SignedCall:
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
    raise NotImplementedError


@_sampler("k")
def sample_topk(
    logits: Tensor, k: Count, *, temperature: Number = 1.0, seed: Count | None = None, offset: Count = 0
) -> SignedCall:
    """Draw one token a row among its `k` largest logits: `sample` with top_k=k of at least 1."""
    raise NotImplementedError


@_sampler("p")
def sample_topp(
    logits: Tensor, p: Number, *, temperature: Number = 1.0, seed: Count | None = None, offset: Count = 0
) -> SignedCall:
    """Draw one token a row among the fewest whose probability reaches `p`: `sample` with top_p=p."""
    raise NotImplementedError


# -- checks ---------------------------------------------------------------------------------------------


Bounds = dict[str, tuple[float, float]]  # of the arguments behind the logits, in order
_HEAT = (0, MAX_TEMPERATURE)
_SAMPLE: Bounds = {"temperature": _HEAT, "top_k": (0, MAX_TOP_K), "top_p": (0, 1)}
_TOPK: Bounds = {"k": (1, MAX_TOP_K), "temperature": _HEAT}
_TOPP: Bounds = {"p": (0, 1), "temperature": _HEAT}


def _check(op: str, bounds: Bounds, args: Args) -> CallSpec:
    logits, *values = args
    checks.need_rows("logits", logits, rank=2)
    named = dict(zip((*bounds, "seed", "offset"), values, strict=True))
    for name, value in named.items():
        if name in ("seed", "offset"):
            checks.need_count(name, value, logits)
        elif name in ("top_k", "k"):
            checks.need_count(name, value, logits, (int(bounds[name][0]), MAX_TOP_K))
        else:
            low, high = map(float, bounds[name])
            checks.need_each_row(name, value, logits, low=low, high=high)
    # A tensor may hold any number, so it counts as a filter.
    filters = {
        "top_k": op == "sample" and not is_constant(named["top_k"], 0),
        "top_p": op == "sample" and not is_constant(named["top_p"], 1),
    }
    features = {**filters, "top_k_and_top_p": all(filters.values())}
    features["seed_per_row"] = isinstance(named["seed"], Tensor)
    return describe(op, [logits], {"N": logits.shape[0], "V": logits.shape[1]}, features)


def _validate_rows(bounds: Bounds, args: Args) -> Args:
    """The arguments behind the logits as copies within their bounds; each row's largest logit is finite."""
    checked_args: Args | None = checks.native_check("rows_within", args, bounds)
    return _looked_through(args, bounds) if checked_args is None else checked_args


def _looked_through(args: Args, bounds: Bounds) -> Args:
    logits: Tensor = args[0]
    if logits.shape[0] == 0 or not checks.can_read_values(logits):
        return args
    largest = logits.detach().amax(-1).tolist()
    for row, worst in enumerate(largest):
        if not math.isfinite(worst):
            raise ValueError(f"logits needs a finite largest value in each row, got {worst} in row {row}")
    checked_args = list(args)
    for position, (name, (low, high)) in enumerate(bounds.items(), 1):
        value = args[position]
        if not isinstance(value, Tensor):
            continue
        checked_args[position] = checks.private_copy(value)
        for row, got in enumerate(checked_args[position].tolist()):
            if not low <= got <= high:
                raise ValueError(f"{name} needs values in [{low}, {high}], got {got} in row {row}")
    return tuple(checked_args)


# -- references -----------------------------------------------------------------------------------------


def sample_reference(
    logits: Tensor, temperature: Number, top_k: Count, top_p: Number, seed: Count, offset: Count
) -> Tensor:
    """Filter, then draw; where every row takes its largest logit there is nothing to weigh."""
    if is_constant(temperature, 0):
        return _require_tokens(draw.greedy_tokens(logits))
    weights = draw.token_weights(logits, temperature, top_k, top_p)
    return _require_tokens(draw.sample_from_weights(weights, seed, offset))


def _require_tokens(tokens: Tensor) -> Tensor:
    """The tokens, where each row has one or the device's data is not read; validation names the row."""
    if tokens.device.type == "cpu" and tokens.numel() and int(tokens.amin()) < 0:
        raise ValueError("logits needs a finite largest value in each row")
    return tokens


_define = partial(
    define_op,
    outputs=lambda args: (OutputSpec((args[0].shape[0],), "int64"),),
    # Exponentials, sums and comparisons of logits that are read once.
    work=estimate(lambda N, V: (10 * N * V, N * V, 8 * N)),
    operands=(0,),
    exact_dims=frozenset({"V"}),
    validate_values_per_batch=True,
    differentiable=False,
    stochastic=True,
    wide_outputs=frozenset({0}),
)
SAMPLE = _define(
    build=sample,
    check=partial(_check, "sample", _SAMPLE),
    reference=sample_reference,
    validate_values=partial(_validate_rows, _SAMPLE),
    batching=SamplingBatching(numbers=(1, 2, 3, 4, 5), seed=4, fractions=frozenset({1, 3})),
)
SAMPLE_TOPK = _define(
    build=sample_topk,
    check=partial(_check, "sample_topk", _TOPK),
    reference=draw.by_top_k(sample_reference),
    validate_values=partial(_validate_rows, _TOPK),
    batching=SamplingBatching(numbers=(1, 2, 3, 4), seed=3, fractions=frozenset({2})),
)
SAMPLE_TOPP = _define(
    build=sample_topp,
    check=partial(_check, "sample_topp", _TOPP),
    reference=draw.by_top_p(sample_reference),
    validate_values=partial(_validate_rows, _TOPP),
    batching=SamplingBatching(numbers=(1, 2, 3, 4), seed=3, fractions=frozenset({1, 2})),
)
