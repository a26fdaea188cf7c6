"""A remembered choice is the choice that would be made now, for random requests, kernels and policies."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from layerzero.dispatch import mode, positional
from layerzero.errors import NoKernelFoundError
from layerzero.kernel import AtLeast, AtMost, Kernel, MultipleOf, OneOf, ProductAtMost, SameAs
from layerzero.ops import table as ops_table
from layerzero.policy import Policy, make_rule
from layerzero.selection.record import Selection
from layerzero.settings import Settings
from tests.kernels import device, kernel

ATTENTION = ops_table.get("attention")
SIZES = st.integers(1, 40)
DIMS = st.sampled_from(["B", "Hq", "Hk", "Sq", "Sk", "D", "G"])


@st.composite
def limits(draw: st.DrawFn) -> Any:
    dim, value = draw(DIMS), draw(st.integers(1, 48))
    when = draw(st.sampled_from(["", "causal", "gqa", "lse"]))
    return draw(
        st.sampled_from(
            [
                AtLeast(dim, value, when=when),
                AtMost(dim, value, when=when),
                MultipleOf(dim, max(1, value % 9), when=when),
                OneOf(dim, (value, value + 8, 64), when=when),
                SameAs("Sq", "Sk", when=when),
                ProductAtMost(("B", "Hq"), value * 4, when=when),
            ]
        )
    )


@st.composite
def registries(draw: st.DrawFn) -> list[Kernel]:
    made = []
    for number in range(draw(st.integers(1, 6))):
        made.append(
            kernel(
                f"made.attention.k{number}",
                launch_us=draw(st.floats(0.5, 50.0)),
                default=draw(st.booleans()),
                rank=draw(st.integers(0, 3)),
                limits=tuple(draw(st.lists(limits(), max_size=4))),
                dtypes=frozenset(
                    draw(st.sets(st.sampled_from(["float32", "bfloat16", "float16"]), min_size=1))
                ),
                features=frozenset(
                    draw(st.sets(st.sampled_from(["causal", "gqa", "lse", "scale", "empty_rows"])))
                ),
                layouts=frozenset(draw(st.sets(st.sampled_from(["BHSD", "BSHD"]), min_size=1))),
                contiguous=draw(st.booleans()),
                mixed_dtypes=draw(st.booleans()),
            )
        )
    return made


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, ...]:
    heads_k = draw(st.integers(1, 3))
    heads = heads_k * draw(st.integers(1, 3))
    batch, sq, sk, size = (
        draw(st.integers(1, 9)),
        draw(SIZES),
        draw(SIZES),
        draw(st.sampled_from([8, 16, 24, 32])),
    )
    dtype = getattr(torch, draw(st.sampled_from(["float32", "bfloat16", "float16"])))
    layout = draw(st.sampled_from(["BHSD", "BSHD"]))

    def tensor(heads: int, length: int) -> torch.Tensor:
        shape = (batch, heads, length, size) if layout == "BHSD" else (batch, length, heads, size)
        return torch.zeros(shape, dtype=dtype)

    _, full = ATTENTION.build(
        tensor(heads, sq),
        tensor(heads_k, sk),
        tensor(heads_k, sk),
        is_causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.3])),
        layout=layout,
        return_lse=draw(st.booleans()),
    )
    return full


POLICIES = st.sampled_from(
    [
        Policy(),
        Policy((make_rule("deny", "made.attention.k0", op="attention", when="Sq > 17"),)),
        Policy((make_rule("boost", "made.attention.k1", factor=0.01, when="D == 16"),)),
        Policy(
            (make_rule("allow", ("made.attention.k0", "made.attention.k2"), op="attention", when="Sk <= 5"),)
        ),
    ]
)


def outcome(selection: Selection | None) -> Any:
    """What must agree: the kernel, its transforms and every verdict's reason codes."""
    if selection is None:
        return None
    verdicts = tuple((c.kernel, c.takes, tuple(r.reason for r in c.rejected)) for c in selection.trace)
    return selection.kernel, selection.transforms, round(selection.expected_us, 6), selection.order, verdicts


@given(registries(), st.lists(calls(), min_size=1, max_size=8), POLICIES, st.booleans())
def test_cached_equals_uncached(
    kernels: list[Kernel], asked: list[Any], policy: Policy, strict: bool
) -> None:
    """Whatever was asked before, the table answers what a decision from scratch answers."""
    own = device(kernels, Settings(strict=strict), policy=policy)
    table = own.table(ATTENTION)
    for full in [*asked, *asked]:
        signature, bits = positional(ATTENTION, full), mode()
        try:
            fresh: Selection | None = table.fresh(table.describe(full, bits))
        except NoKernelFoundError:
            fresh = None
        try:
            cached: Selection | None = own.plan(ATTENTION, signature, full, bits).record()
        except NoKernelFoundError:
            cached = None
        assert outcome(cached) == outcome(fresh)


@given(registries(), calls())
def test_the_chosen_kernel_has_no_reason_against_it(kernels: list[Kernel], full: Any) -> None:
    """Chosen kernels take the call, the order starts with the chosen one, and rejected ones say why."""
    own = device(kernels)
    try:
        selection = own.plan(ATTENTION, positional(ATTENTION, full), full, mode()).record()
    except NoKernelFoundError as refused:
        assert refused.trace and all(c.rejected for c in refused.trace)
        return
    assert selection.candidate(selection.kernel).takes
    assert selection.order[0] == selection.kernel
    assert len(set(selection.order)) == len(selection.order)
    assert all(c.takes or c.rejected for c in selection.trace)
