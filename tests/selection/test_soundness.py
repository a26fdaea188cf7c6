"""A remembered choice is the choice that would be made now, for random requests, kernels and policies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from layerzero.ops import table as ops_table
from layerzero.selection.modes import AUTOCAST, DETERMINISTIC, GRAD, mode_bits
from layerzero.selection.plan import signature_of
from layerzero.selection.policy import Policy, make_rule
from layerzero.selection.record import Selection
from layerzero.spec.errors import NoKernelFoundError
from layerzero.spec.kernel import Kernel
from layerzero.spec.settings import Settings
from tests.kernels import device, kernel

ATTENTION = ops_table.get("attention")
SIZES = st.integers(1, 40)
DIMS = st.sampled_from(["B", "Hq", "Hk", "Sq", "Sq", "Sk", "Sk", "D", "G"])
# Sizes that share a point of the key's grid: only a bound between two of them tells them apart.
CELL = range(25, 33)


@st.composite
def limits(draw: st.DrawFn) -> Any:
    dim, value = draw(DIMS), draw(st.one_of(st.integers(1, 48), st.sampled_from(CELL)))
    when = draw(st.sampled_from(["", " when causal", " when gqa", " when lse"]))
    return draw(
        st.sampled_from(
            [
                f"{dim} >= {value}{when}",
                f"{dim} <= {value}{when}",
                f"{dim} % {max(1, value % 9)} == 0{when}",
                f"{dim} in [{value}, {value + 8}, 64]{when}",
                f"{dim} not in [{value}, {value + 8}]{when}",
                f"Sq == Sk{when}",
                f"B * Hq <= {value * 4}{when}",
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
                last_stride1=draw(st.booleans()),
                alignment=draw(st.sampled_from([1, 16])),
                gradient=draw(st.booleans()),
                deterministic=draw(st.booleans()),
                autocast=draw(st.booleans()),
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
        Policy((make_rule("deny", "made.attention.k0", op="attention", when="Sq > 28"),)),
        Policy((make_rule("boost", "made.attention.k1", factor=0.01, when="D == 16"),)),
        Policy(
            (make_rule("allow", ("made.attention.k0", "made.attention.k2"), op="attention", when="Sk <= 28"),)
        ),
    ]
)


def outcome(selection: Selection | None) -> Any:
    """What must agree: the kernel, its transforms and every verdict's reason codes."""
    if selection is None:
        return None
    verdicts = tuple((c.kernel, c.eligible, tuple(r.reason for r in c.rejected)) for c in selection.trace)
    return selection.kernel, selection.transforms, round(selection.expected_us, 6), selection.order, verdicts


@dataclass(frozen=True)
class Asked:
    """One call of attention in words; `lies` says how its operands lie in memory, `bits` torch's modes."""

    batch: int
    sq: int
    sk: int
    heads: int
    size: int = 16
    dtype: str = "float32"
    dtype_k: str = "float32"
    layout: str = "BHSD"
    causal: bool = False
    scale: float | None = None
    lse: bool = False
    lies: str = "dense"
    grad: bool = False
    bits: int = GRAD

    def full(self) -> tuple[Any, ...]:
        """The op's arguments."""
        tensors = (
            self.tensor(self.heads, self.sq, self.dtype),
            self.tensor(1, self.sk, self.dtype_k),
            self.tensor(1, self.sk, self.dtype_k),
        )
        _, full = ATTENTION.build(
            *tensors, is_causal=self.causal, scale=self.scale, layout=self.layout, return_lse=self.lse
        )
        return full

    def tensor(self, heads: int, length: int, dtype: str) -> torch.Tensor:
        axes = (heads, length) if self.layout == "BHSD" else (length, heads)
        shape, kind = (self.batch, *axes, self.size), getattr(torch, dtype)
        if self.lies == "apart":
            return torch.zeros(*shape[:3], 2 * self.size, dtype=kind)[..., ::2]
        if self.lies == "wide":
            return torch.zeros(*shape[:3], 2 * self.size, dtype=kind)[..., : self.size]
        if self.lies == "misaligned":
            return torch.zeros(shape[0] * shape[1] * shape[2] * shape[3] + 1, dtype=kind)[1:].view(shape)
        return torch.zeros(shape, dtype=kind, requires_grad=self.grad)


@st.composite
def alike(draw: st.DrawFn) -> list[Asked]:
    """A call and others that differ from it in one thing each: what a key leaves out, two of them share."""
    first = Asked(
        batch=draw(st.integers(1, 4)),
        sq=draw(st.sampled_from(CELL)),
        sk=draw(st.sampled_from(CELL)),
        heads=draw(st.sampled_from([1, 2])),
        causal=draw(st.booleans()),
        layout=draw(st.sampled_from(["BHSD", "BSHD"])),
    )
    others = [
        *(replace(first, sq=draw(st.sampled_from(CELL))) for _ in range(2)),
        *(replace(first, sk=draw(st.sampled_from(CELL))) for _ in range(2)),
        replace(first, sq=33 + draw(st.integers(0, 15))),
        replace(first, sk=200),
        replace(first, heads=4),
        replace(first, size=32),
        replace(first, dtype="bfloat16", dtype_k="bfloat16"),
        replace(first, dtype_k="float16"),
        replace(first, causal=not first.causal),
        replace(first, scale=0.3),
        replace(first, lse=True),
        replace(first, layout="BSHD" if first.layout == "BHSD" else "BHSD"),
        *(replace(first, lies=lies) for lies in ("apart", "wide", "misaligned")),
        replace(first, grad=True),
        replace(first, bits=GRAD | DETERMINISTIC),
        replace(first, bits=GRAD | AUTOCAST),
    ]
    return draw(st.permutations([first, *others]))


# Two sizes of one point of the grid, a bound and a policy's condition between them: drawn ones may miss it.
BETWEEN = [Asked(2, 26, 32, 2), Asked(2, 31, 32, 2)]
BOUNDED = [kernel("made.attention.k0", limits=("Sq <= 28",)), kernel("made.attention.k1", launch_us=50.0)]
FREE = [kernel("made.attention.k0"), kernel("made.attention.k1", launch_us=50.0)]
DENIED = Policy((make_rule("deny", "made.attention.k0", op="attention", when="Sq > 28"),))


@pytest.mark.filterwarnings("ignore:Generating overly large repr")  # of what was drawn, when it fails
@given(registries(), alike(), st.lists(calls(), max_size=3), POLICIES, st.booleans())
@example(BOUNDED, BETWEEN, [], Policy(), False)
@example(FREE, BETWEEN, [], DENIED, False)
def test_cached_equals_uncached(
    kernels: list[Kernel], asked: list[Asked], others: list[Any], policy: Policy, strict: bool
) -> None:
    """Whatever was asked before, the table answers what a decision from scratch answers."""
    own = device(kernels, Settings(strict=strict), policy=policy)
    table = own.table(ATTENTION)
    whole = [*((each.full(), each.bits) for each in asked), *((full, mode_bits()) for full in others)]
    for full, bits in [*whole, *whole]:
        request = table.describe(full, bits)
        try:
            fresh: Selection | None = table.recompute(request)
        except NoKernelFoundError:
            fresh = None
        try:
            # An address is in the key alone: plans of a signature look at it when they run.
            plan = (
                own.plan(ATTENTION, signature_of(ATTENTION, full), full, bits)
                if request.alignment >= 16
                else table.plan_for(request)
            )
            cached: Selection | None = plan.selection_for_request()
        except NoKernelFoundError:
            cached = None
        assert outcome(cached) == outcome(fresh)


def test_calls_that_nothing_tells_apart_share_a_choice() -> None:
    """Two sizes of one cell are one decision until a bound, or a condition of the policy, falls between."""
    first, second = Asked(2, 26, 32, 2), Asked(2, 31, 32, 2)
    bound = ("Sq <= 28",)
    rule = Policy((make_rule("deny", "made.attention.k1", op="attention", when="Sq > 28"),))
    for kernels, policy, decisions in (
        ([kernel("made.attention.k0")], Policy(), 1),
        ([kernel("made.attention.k0", limits=bound)], Policy(), 2),
        ([kernel("made.attention.k0")], rule, 2),
    ):
        own = device([*kernels, kernel("made.attention.k1")], policy=policy)
        for asked in (first, second, first):
            full = asked.full()
            own.plan(ATTENTION, signature_of(ATTENTION, full), full, mode_bits())
        assert own.table(ATTENTION).computed == decisions


@given(registries(), calls())
def test_the_chosen_kernel_has_no_reason_against_it(kernels: list[Kernel], full: Any) -> None:
    """Chosen kernels take the call, the order starts with the chosen one, and rejected ones say why."""
    own = device(kernels)
    try:
        selection = own.plan(
            ATTENTION, signature_of(ATTENTION, full), full, mode_bits()
        ).selection_for_request()
    except NoKernelFoundError as refused:
        assert refused.trace and all(c.rejected for c in refused.trace)
        return
    assert selection.candidate(selection.kernel).eligible
    assert selection.order[0] == selection.kernel
    assert len(set(selection.order)) == len(selection.order)
    assert all(c.eligible or c.rejected for c in selection.trace)
