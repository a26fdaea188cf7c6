"""Who owns what: callers edit, keep, drop and reorder outputs of shared batches, and nobody else notices."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

import layerzero as lz
from tests import kernels

WIDTH, WORDS = 16, 40
OPS = ("rms_norm", "layer_norm", "linear", "mlp", "add_rms_norm", "rope", "attention", "doubled")


@dataclass(eq=False)
class Cell:
    """A tensor that a caller holds, and what must be in it."""

    tensor: Tensor
    expected: Tensor

    @property
    def intact(self) -> bool:
        return torch.equal(self.tensor, self.expected)


@dataclass(eq=False)
class Caller:
    """One request: what it goes on with, and what it kept from before."""

    now: Cell
    kept: list[Cell] = field(default_factory=list)


def doubled(x: Tensor) -> Tensor:
    """A function over rows, for `lz.batched`."""
    return x * 2


class Company(RuleBasedStateMachine):
    """Callers meet in rounds of one op, in any order and any company; each round is also run alone.

    Under strict determinism the two must agree bit by bit, whatever became of earlier outputs.
    """

    inline_limit_us: ClassVar[float] = 0.0
    ops: ClassVar[tuple[str, ...]] = OPS
    planted: ClassVar[tuple[lz.Kernel, ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        # Estimates alone: a planted kernel is never the one that was measured.
        how = lz.Settings(
            determinism="strict",
            warm="off",
            inline_limit_us=self.inline_limit_us,
            perfdb=None,
            shipped_tables=False,
        )
        self.scope: AbstractContextManager[lz.Runtime] = lz.start(how, scoped=True)
        runtime = self.scope.__enter__()
        for kernel in self.planted:
            runtime.add_kernel(kernel)
            lz.prefer(kernel.op, kernel.id)
        self.runner = asyncio.Runner()
        random = torch.Generator().manual_seed(0)
        self.random = random
        self.weight = torch.randn(WIDTH, WIDTH, generator=random)
        self.wide = torch.randn(2 * WIDTH, WIDTH, generator=random)
        self.narrow = torch.randn(WIDTH, 2 * WIDTH, generator=random)
        self.gain = torch.rand(WIDTH, generator=random) + 0.5
        self.words = torch.randn(WORDS, WIDTH, generator=random)
        angles = torch.rand(8, 2, generator=random)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.pools = torch.zeros(16, 8, 1, WIDTH), torch.zeros(16, 8, 1, WIDTH)
        self.written = torch.zeros(16, 8, 1, WIDTH)
        self.slots = itertools.count()
        self.callers: list[Caller] = []

    # -- what a round runs -------------------------------------------------------------------------

    def call(self, ops: Any, name: str, x: Tensor, before: Tensor) -> Any:
        """One op over a caller's rows; `ops` is `lz` or `lz.sync`."""
        if name == "rms_norm":
            return ops.rms_norm(x, self.gain)
        if name == "layer_norm":
            return ops.layer_norm(x, self.gain, self.gain)
        if name == "linear":
            return ops.linear(x, self.weight)
        if name == "mlp":
            return ops.mlp(x, self.wide, self.narrow, activation="silu")
        if name == "add_rms_norm":
            return ops.add_rms_norm(x, before, self.gain)
        heads = x.view(-1, 4, 4)
        if name == "rope":
            return ops.rope(heads, heads[:, :2], torch.zeros(len(x), dtype=torch.int64), self.cos, self.sin)
        return ops.attention(*[heads.transpose(0, 1)[None]] * 3)

    def alone(self, name: str, x: Tensor, before: Tensor) -> Any:
        """The same op over copies of a caller's rows, blocking; a copy of what it gives."""
        out = self.call(lz.sync, name, x.clone(), before.clone())
        return tuple(part.clone() for part in out) if isinstance(out, tuple) else out.clone()

    async def together(self, calls: list[Awaitable[Any]]) -> list[Any]:
        return await asyncio.gather(*calls)

    def chosen(self, order: list[int]) -> list[Caller]:
        """Some callers, in the drawn order, each once."""
        return list(dict.fromkeys(self.callers[index % len(self.callers)] for index in order))

    # -- what callers do ---------------------------------------------------------------------------

    @rule(ids=st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=3))
    def begin(self, ids: list[int]) -> None:
        """A new caller embeds its words; others may be there already."""
        (rows,) = self.runner.run(self.together([lz.embedding(torch.tensor(ids), self.words)]))
        self.callers.append(Caller(Cell(rows, self.words[ids].clone())))

    @precondition(lambda self: self.callers)
    @rule(which=st.integers(0, 7), order=st.lists(st.integers(0, 7), min_size=1, max_size=8))
    def meet(self, which: int, order: list[int]) -> None:
        """Some callers await the same op in some order; each goes on with its own rows of the result."""
        name, meeting = self.ops[which % len(self.ops)], self.chosen(order)
        pairs = [(caller.now, (caller.kept or [caller.now])[-1]) for caller in meeting]
        pairs = [(now, before if before.tensor.shape == now.tensor.shape else now) for now, before in pairs]
        # What one would have alone is a copy, made before the round: nothing of it can share memory with it.
        alone: list[Any]
        if name == "doubled":
            alone = [now.expected * 2 for now, _ in pairs]
            calls = [lz.batched(doubled)(now.tensor) for now, _ in pairs]
        else:
            alone = [self.alone(name, now.expected, before.expected) for now, before in pairs]
            calls = [self.call(lz, name, now.tensor, before.tensor) for now, before in pairs]
        found = self.runner.run(self.together(calls))
        assert all(now.intact and before.intact for now, before in pairs), (
            f"{name} changed what callers gave it"
        )
        for caller, got, wanted in zip(meeting, found, alone, strict=True):
            parts = zip(got, wanted, strict=True) if isinstance(got, tuple) else [(got, wanted)]
            cells = [Cell(tensor, expected.clone()) for tensor, expected in parts]
            caller.kept += cells[1:]
            # Rows again, without a copy where they lie so: heads side by side.
            first = cells[0]
            if name == "attention":
                first = Cell(first.tensor[0].transpose(0, 1), first.expected[0].transpose(0, 1))
            rows = [part.reshape(-1, WIDTH) for part in (first.tensor, first.expected)]
            caller.now = Cell(*rows)

    @precondition(lambda self: self.callers)
    @rule(index=st.integers(0, 7), factor=st.sampled_from([0.5, -1.0, 2.0]))
    def edit(self, index: int, factor: float) -> None:
        """A caller changes its output in place."""
        cell = self.callers[index % len(self.callers)].now
        cell.tensor.mul_(factor)
        cell.expected.mul_(factor)

    @precondition(lambda self: self.callers)
    @rule(index=st.integers(0, 7))
    def keep(self, index: int) -> None:
        """A caller keeps what it has, as it is; from here on a result of its own."""
        caller = self.callers[index % len(self.callers)]
        if caller.now not in caller.kept:
            caller.kept.append(caller.now)

    @precondition(lambda self: self.callers)
    @rule(index=st.integers(0, 7))
    def go(self, index: int) -> None:
        """A caller drops out; its rows stay in whatever batch they are a part of."""
        self.callers.pop(index % len(self.callers))

    @precondition(lambda self: self.callers)
    @rule(index=st.integers(0, 7))
    def leave(self, index: int) -> None:
        """What leaves carries its own rows and no one else's."""
        cell = self.callers[index % len(self.callers)].now
        (host,) = self.runner.run(self.together([lz.to_host(cell.tensor)]))
        own = cell.expected.numel() * cell.expected.element_size()
        assert host.untyped_storage().nbytes() == own
        assert len(pickle.dumps(host)) < own + 1000
        assert torch.equal(host, cell.expected)

    @precondition(lambda self: self.callers)
    @rule(order=st.lists(st.integers(0, 7), min_size=1, max_size=8))
    def append(self, order: list[int]) -> None:
        """Some callers write their rows into the pool, each into slots of its own."""
        meeting = self.chosen(order)
        counts = [len(caller.now.tensor) for caller in meeting]
        slots = [torch.tensor([next(self.slots) % 128 for _ in range(count)]) for count in counts]
        calls: list[Awaitable[Any]] = [
            lz.append_kv(rows, rows, self.pools[0], self.pools[1], own)
            for rows, own in zip([c.now.tensor.view(-1, 1, WIDTH) for c in meeting], slots, strict=True)
        ]
        self.runner.run(self.together(calls))
        for caller, own in zip(meeting, slots, strict=True):
            self.written.flatten(0, 1)[own] = caller.now.expected.view(-1, 1, WIDTH)

    # -- what must hold ----------------------------------------------------------------------------

    @invariant()
    def everybody_has_what_one_would_have_alone(self) -> None:
        for caller in self.callers:
            assert caller.now.intact
            assert all(cell.intact for cell in caller.kept)

    @invariant()
    def the_pools_hold_what_was_written(self) -> None:
        assert all(torch.equal(pool, self.written) for pool in self.pools)

    def teardown(self) -> None:
        self.runner.close()
        self.scope.__exit__(None, None, None)


class CompanyInline(Company):
    """The same on the loop's own thread."""

    inline_limit_us = 1e9


TestCompany = Company.TestCase
TestCompany.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestCompanyInline = CompanyInline.TestCase
TestCompanyInline.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


# -- the control: kernels that do not keep to it ----------------------------------------------------------


def in_place() -> Callable[..., Tensor]:
    """A norm that scales what it was given."""

    def run(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x.mul_((x.float().pow(2).mean(-1, keepdim=True) + (eps or torch.finfo(x.dtype).eps)).rsqrt())
        return x * weight

    return run


def handed_back() -> Callable[..., Tensor]:
    """A norm whose output is its input's memory."""
    scale = in_place()

    def run(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x.copy_(scale(x, weight, eps))

    return run


def one_buffer() -> Callable[..., Tensor]:
    """A linear that writes every result into the same memory, as a kernel with a workspace might."""
    buffer = torch.zeros(64, WIDTH)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return buffer[: len(x)].copy_(own_rows()(x, weight, bias))

    return run


def own_rows() -> Callable[..., Tensor]:
    """A linear that keeps to it: row by row, into new memory."""

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.cat([torch.nn.functional.linear(row[None].clone(), weight, bias) for row in x])

    return run


LIARS: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "bad.rms_norm.in_place": in_place,
    "bad.rms_norm.handed_back": handed_back,
    "bad.linear.one_buffer": one_buffer,
}


def live_with(name: str, load: Callable[[], Callable[..., Tensor]]) -> int:
    """The random lives with a kernel of the test's own, loaded anew for each; how often it ran.

    Raises: AssertionError: somebody's rows are not what they were.
    """
    ran = itertools.count()

    def counted() -> Callable[..., Tensor]:
        run = load()

        def counting(*args: Any) -> Tensor:
            next(ran)
            return run(*args)

        return counting

    class Planted(CompanyInline):
        ops = (name.split(".")[1], "doubled")
        planted = (kernels.kernel(name, load=counted, launch_us=0.01, batch_invariant=True, rank=0),)

    lives = settings(
        max_examples=60, stateful_step_count=30, deadline=None, phases=[Phase.generate], database=None,
        print_blob=False,
    )  # fmt: skip
    run_state_machine_as_test(Planted, settings=lives)
    return next(ran)


@pytest.mark.parametrize("name", LIARS)
def test_a_kernel_that_writes_what_callers_hold_is_caught(name: str) -> None:
    """Each planted kernel breaks what somebody holds within a few lives, whatever lives are drawn."""
    with pytest.raises(AssertionError):
        live_with(name, LIARS[name])


def test_a_planted_kernel_that_keeps_to_it_is_not_caught() -> None:
    """The control of the control: it is what a kernel writes that is caught, not that it was planted."""
    assert live_with("good.linear.own_rows", own_rows) > 0


def test_pieces_of_one_batch_come_back_without_a_copy() -> None:
    """The next batch of the same callers in the same order runs on the very memory of the last."""
    addresses: list[int] = []

    def watched(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        addresses.append(x.data_ptr())
        out = torch.nn.functional.linear(x, weight, bias)
        addresses.append(out.data_ptr())
        return out

    async def caller(row: Tensor, weight: Tensor) -> Tensor:
        for _ in range(3):
            row = await lz.linear(row, weight)
        return row

    async def crowd() -> None:
        weight = torch.eye(WIDTH)
        await asyncio.gather(*[caller(torch.randn(1, WIDTH), weight) for _ in range(8)])

    with lz.start(lz.Settings(warm="off"), scoped=True) as runtime:
        runtime.add_kernel(kernels.kernel("watched.linear", watched, launch_us=0.01))
        lz.prefer("linear", "watched.linear")
        asyncio.run(crowd())
    _, first, second, third, fourth, _ = addresses
    assert (second, fourth) == (first, third)


@pytest.fixture(autouse=True)
def _no_policy_stays() -> Iterator[None]:
    yield
    lz.reset_policy()
