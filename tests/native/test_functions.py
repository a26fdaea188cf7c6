"""Batched functions and the way into the queue: compiled and Python form the same batches in one order."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import layerzero as lz
from layerzero.native import FAST_PATH
from layerzero.spec.errors import BackendNotAvailableError
from tests.waiting import LIMIT_S

WIDTH = 4
COUNTED = ("submitted", "done", "failed", "cancelled", "expired", "rejected", "batches", "tokens", "sizes")


@pytest.fixture(autouse=True)
def compiled() -> Any:
    """The module, in use while a test runs."""
    before = FAST_PATH.module
    try:
        yield FAST_PATH.load()
    except BackendNotAvailableError as error:
        pytest.skip(f"nothing to compile with: {error}")
    finally:
        FAST_PATH.use(before)


def doubled(x: Tensor) -> Tensor:
    return x * 2


class Model:
    """Three functions over rows that note who met."""

    def __init__(self) -> None:
        self.met: list[Any] = []

    def double(self, x: Tensor, names: list[Any], counts: list[int]) -> Tensor:
        self.met.append(("double", names, counts))
        return x * 2

    def both(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.met.append(("both", len(x)))
        return y + 1, x - 1

    def lengths(self, texts: list[str], factors: list[int]) -> list[int]:
        self.met.append(("lengths", len(texts)))
        return [len(text) * factor for text, factor in zip(texts, factors, strict=True)]

    def picky(self, x: Tensor) -> Tensor:
        self.met.append(("picky", len(x)))
        if bool((x > 1e4).any()):
            raise ValueError("x needs values of at most 10000")
        return x * 100


one_call = st.tuples(
    st.sampled_from(["double", "double", "both", "picky", "turn"]),
    st.sampled_from([{}] * 6 + [{"priority": 0}, {"priority": 2}, {"timeout": 60.0}, {"batching": "off"}]),
    st.sampled_from(["plain"] * 5 + ["double", "wrong", "scalar", "graph", "parameter"]),
)
programs = st.lists(
    st.tuples(st.sampled_from([1, 1, 1, 2, 0]), st.lists(one_call, min_size=1, max_size=5)),
    min_size=1,
    max_size=6,
)


def formed(x: Tensor, form: str) -> Tensor:
    """The rows as they are, of another dtype or class, or none that a function takes."""
    if form == "double":
        return x.double()
    if form == "graph":
        return x.detach().clone().requires_grad_()
    if form == "parameter":
        return torch.nn.Parameter(x, requires_grad=False)
    return x.new_tensor(1.0) if form == "scalar" else x


async def caller(model: Model, name: int, rows: int, calls: list[Any]) -> list[Any]:
    """One caller's outcomes, each call behind the last."""
    seen: list[Any] = []
    x = torch.full((rows, WIDTH), float(name))
    for what, how, form in calls:
        given_rows = formed(x, form)
        short = {key: value for key, value in how.items() if key != "batching" or what != "turn"}
        try:
            if what == "turn":
                await asyncio.sleep(0)
                continue
            if what == "double":
                out = await lz.batched(model.double)(given_rows, str(name) if name % 2 else name, **short)
            elif what == "both":
                other = x[:-1] if form == "wrong" else x
                out, _ = await lz.batched(model.both)(given_rows, other, **short)
            else:
                out = await lz.batched(model.picky, pure=True)(given_rows, **short)
        except (ValueError, TypeError, RuntimeError) as error:
            seen.append((type(error), str(error).split("\n")[0][:60]))
            continue
        x = out.detach().float()
        seen.append((out.dtype, out.requires_grad, out.detach().tolist()))
    return seen


async def history(told: list[Any], module: Any) -> tuple[Any, ...]:
    """Outcomes, who met in which order, and what the batcher counted."""
    FAST_PATH.use(module)
    model = Model()
    # Everything runs in the loop's own turns: no thread decides who meets.
    with lz.start(
        lz.Settings(warm="off", inline_limit_us=1e12, max_inline_us=1e12, priority_aging_ms=1e9)
    ) as runtime:
        for function in (model.double, model.both):
            lz.batched(function).us_per_row = 1.0
        lz.batched(model.picky, pure=True).us_per_row = 1.0
        # Nothing runs at once either: that goes by measured times.
        at_once = runtime.device("cpu").loop_drivers.current().batcher.at_once
        assert at_once is not None
        at_once.limit_us = 0.0
        outcomes = []
        for _ in range(2):
            outcomes += await asyncio.gather(*(caller(model, i, *one) for i, one in enumerate(told)))
        stats = runtime.device("cpu").loop_drivers.stats()
    return outcomes, model.met, {name: getattr(stats, name) for name in COUNTED}


@settings(max_examples=40, deadline=None)
@given(told=programs)
def test_histories_of_functions_are_the_same_compiled_and_in_python(told: list[Any]) -> None:
    """The same values and errors, the same batches in the same order, the same counts."""
    module = FAST_PATH.module
    ours = asyncio.run(history(told, module))
    theirs = asyncio.run(history(told, None))
    FAST_PATH.use(module)
    assert ours == theirs


@pytest.mark.asyncio
async def test_a_known_call_is_queued_without_python() -> None:
    """From the second round on every caller's pending call comes from the memo, and the queue takes it."""
    model = Model()
    with lz.start(lz.Settings(warm="off"), scoped=False) as runtime:
        call: Any = lz.batched(model.double)
        front = runtime.device("cpu").loop_drivers.current()
        x = torch.ones(1, WIDTH)

        async def calls() -> list[bool]:
            found = []
            for _ in range(3):
                ticket = call.entries.find((x, "a"), {})
                found.append(ticket is not None)
                await call(x, "a")
            return found

        each = await asyncio.gather(*(calls() for _ in range(4)))
        assert [found[1:] for found in each] == [[True, True]] * 4
        call.us_per_row = 2.5
        ticket = call.entries.find((x, "a"), {})
        assert (ticket.tokens, ticket.bytes, ticket.expected_us) == (1, x.nbytes, 2.5)
        assert ticket.driver is front and ticket.device is runtime.device("cpu")
        assert call.entries.find((x, 1), {}) is None, "another class beside the rows is another kind"
        assert call.entries.find((x.double(), "a"), {}) is None
        with torch.no_grad():
            assert call.entries.find((x, "a"), {}) is None, "other modes are another kind"
        ticket = call.entries.find((x, "a"), {})
        assert not FAST_PATH.module.queue(front, ticket), "this task has never called: Python makes it known"
        assert front.batcher.queued == 0 and ticket.state == 0
    assert call.entries.find((x, "a"), {}) is None, "the runtime is gone"


@pytest.mark.asyncio
async def test_a_known_call_without_tensors_is_a_row_of_the_host() -> None:
    """Texts are queued without Python as rows are; results are their callers'; other classes, other kinds."""
    model = Model()
    with lz.start(lz.Settings(warm="off"), scoped=False) as runtime:
        call: Any = lz.batched(model.lengths)
        assert call.entries.find(("a", 1), {}) is None
        wanted = [[size * 3, size * 3] for size in range(4)]

        async def twice(text: str) -> list[int]:
            return [await call(text, 3), await call(text, 3)]

        assert await asyncio.gather(*(twice("x" * size) for size in range(4))) == wanted
        assert model.met == [("lengths", 4)] * 2
        call.us_per_row = 2.5
        ticket = call.entries.find(("a", 1), {})
        assert (ticket.tokens, ticket.bytes, ticket.expected_us) == (1, 0, 2.5)
        assert ticket.device is runtime.device("cpu")
        assert call.entries.find((b"a", 1), {}) is None and call.entries.find(("a",), {}) is None
        with torch.no_grad():
            assert call.entries.find(("a", 1), {}) is None, "other modes are another kind"
    assert call.entries.find(("a", 1), {}) is None, "the runtime is gone"


@pytest.mark.asyncio
async def test_what_is_remembered_keeps_no_owner_alive() -> None:
    """A method's memo dies with its object, and with it the classes and the device it knew."""
    model = Model()
    gone = weakref.ref(model)
    with lz.start(lz.Settings(warm="off")):
        x = torch.ones(1, WIDTH)
        await asyncio.gather(*(lz.batched(model.double)(x, "a") for _ in range(3)))
        del model
        gc.collect()
        assert gone() is None


def test_columns_are_what_python_makes_of_them() -> None:
    """Pieces of one tensor come back as it is, others are gathered; everything else stands in lists."""
    whole = torch.arange(12.0).view(6, 2)
    calls = [(whole[i : i + 2], f"h{i}", torch.full((2,), float(i))) for i in (0, 2, 4)]
    counts, (rows, names, scales) = FAST_PATH.module.columns(calls)
    assert counts == [2, 2, 2] and names == ["h0", "h2", "h4"]
    assert rows.data_ptr() == whole.data_ptr() and torch.equal(rows, whole)
    assert scales.tolist() == [0, 0, 2, 2, 4, 4]
    assert FAST_PATH.module.columns([("a", 1), ("b", 2)]) == ([1, 1], (["a", "b"], [1, 2]))
    assert FAST_PATH.module.columns([(torch.tensor(1.0),)]) is NotImplemented
    assert FAST_PATH.module.columns([(whole,), ("a", "b")]) is NotImplemented


def test_own_copies_a_piece_and_leaves_a_whole_alone() -> None:
    """A row of a batch is copied without its graph; what is alone already is not."""
    whole = torch.randn(4, 3, requires_grad=True)
    piece = FAST_PATH.module.own(whole[1:2])
    assert torch.equal(piece, whole[1:2]) and not piece.requires_grad
    assert piece.untyped_storage().nbytes() == 12
    assert FAST_PATH.module.own(whole) is NotImplemented and FAST_PATH.module.own("text") is NotImplemented


@pytest.mark.asyncio
async def test_a_known_call_is_a_coroutine_like_any_other() -> None:
    """It runs as a task, raises what is thrown into it, ends by `close`, complains if nobody awaits it."""
    model = Model()
    with lz.start(lz.Settings(warm="off")):
        call, x = lz.batched(model.double), torch.ones(1, WIDTH)
        made: list[Any] = []
        for _ in range(2):  # the second time its kind is known
            made = [call(x, "a"), call(x, "b")]
            assert all(asyncio.iscoroutine(one) for one in made)
            found = await asyncio.gather(*(asyncio.create_task(one) for one in made))
            assert [out.tolist() for out in found] == [[[2.0] * WIDTH]] * 2
        with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
            await made[0]
        thrown: Any = call(x, "a")
        with pytest.raises(KeyError, match="mine"):
            thrown.throw(KeyError("mine"))
        with pytest.raises(OSError, match="full"):
            call(x, "a").throw(OSError, "full")  # type: ignore[attr-defined]
        closed: Any = call(x, "a")
        closed.close()
        with pytest.raises(RuntimeError, match="already awaited"):
            closed.send(None)
        with pytest.warns(RuntimeWarning, match="coroutine .Model.double. was never awaited"):
            call(x, "a")


@pytest.mark.asyncio
async def test_a_known_call_notes_its_plan_and_finds_its_modes_again() -> None:
    """Behind a call of a function no op's plan stands as the last one; grad mode is what it was before."""
    model = Model()
    with lz.start(lz.Settings(warm="off")):
        call, x = lz.batched(model.double), torch.ones(1, WIDTH)

        async def caller(grad: bool) -> Any:
            seen: Any = None
            for _ in range(3):
                lz.sync.rms_norm(x, torch.ones(WIDTH))
                with torch.set_grad_enabled(grad):
                    await call(x, "a")
                    seen = lz.last_selection(), torch.is_grad_enabled()
            return seen

        assert await asyncio.gather(*(caller(index % 2 == 0) for index in range(4))) == [
            (None, True), (None, False), (None, True), (None, False),
        ]  # fmt: skip


@pytest.mark.asyncio
async def test_known_calls_leave_nothing_alive() -> None:
    """What a call was given dies with its result, also where it was cancelled while it waited."""
    model = Model()
    with lz.start(lz.Settings(warm="off")):
        call = lz.batched(model.double)
        for _ in range(2):
            await asyncio.gather(*(call(torch.ones(1, WIDTH), "a") for _ in range(3)))
        model.met.clear()
        x = torch.ones(1, WIDTH)
        given, task = weakref.ref(x), asyncio.ensure_future(call(x, "a"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del x, task
        for _ in range(200):  # a batch that ran already keeps its calls until it has ended
            gc.collect()
            if given() is None:
                break
            await asyncio.sleep(0.01)
        assert given() is None


@pytest.mark.asyncio
async def test_of_two_that_await_one_call_the_second_is_told_so() -> None:
    """As with a coroutine of Python's: the first gets its value, whoever comes when, and however."""
    model = Model()
    with lz.start(lz.Settings(warm="off")):
        call, x = lz.batched(model.double), torch.ones(1, WIDTH)

        async def awaits(one: Any) -> Any:
            return await one

        for _ in range(3):  # the first time nothing is known of its kind
            for first in (awaits, asyncio.create_task):
                one: Any = call(x, "a")
                outs: Any = await asyncio.gather(
                    first(one), awaits(one), call(x, "b"), return_exceptions=True
                )
                assert outs[0].tolist() == outs[2].tolist() == [[2.0] * WIDTH]
                assert isinstance(outs[1], RuntimeError) and "awaited already" in str(outs[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_known_call_finds_the_loop_of_a_forked_child() -> None:
    """A child forked by a coroutine has its parent's thread number, and loops of its own."""
    call = lz.batched(doubled)

    async def crowd() -> list[float]:
        outs: list[float] = []
        for _ in range(3):
            outs += [out.item() for out in await asyncio.gather(*(call(torch.ones(1, 1)) for _ in range(3)))]
        return outs

    async def in_child() -> None:
        task = asyncio.ensure_future(crowd())
        done, _ = await asyncio.wait({task}, timeout=LIMIT_S / 4)
        os._exit(0 if done and task.result() == [2.0] * 9 else 2)  # what waits elsewhere cannot be cancelled

    async def parent() -> int:
        assert await crowd() == [2.0] * 9
        child = os.fork()
        if child == 0:
            try:
                asyncio.run(in_child())
            finally:
                os._exit(1)
        assert await crowd() == [2.0] * 9
        return child

    with lz.start(lz.Settings(warm="off")):
        child = asyncio.run(parent())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
