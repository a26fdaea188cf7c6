"""The compiled twin against the Python it stands for: rows, modes, pending calls, and what a memo may
answer."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import layerzero as lz
from layerzero.calls.blocking import last_selection
from layerzero.native import FAST_PATH
from layerzero.ops import batching
from layerzero.scheduler.core.at_once import GroupCosts
from layerzero.scheduler.core.batcher import Batcher
from layerzero.scheduler.core.limits import BatcherStats, BatchLimits
from layerzero.scheduler.core.pending_call import PENDING_CALL, Caller, PendingCall
from layerzero.scheduler.core.round_robin import BatchQueue, ProgramPoint, RoundRobin
from layerzero.scheduler.fast_queue import FAST_QUEUE
from layerzero.scheduler.inline_runs import InlineRuns
from layerzero.scheduler.loop_driver import LoopDriver
from layerzero.scheduler.modes import torch_modes as modes
from layerzero.selection.record import Selection
from tests.native.twins import compiled as compiled


def in_python(pieces: list[Tensor]) -> Tensor | None:
    """`rejoin` as Python does it."""
    return batching.as_view_of_base(pieces)


@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    width=st.integers(1, 3),
    column=st.booleans(),
    shuffled=st.booleans(),
    copied=st.booleans(),
)
def test_rejoin_finds_what_python_finds(
    counts: list[int], width: int, column: bool, shuffled: bool, copied: bool
) -> None:
    """Same answer and same view for pieces in order, out of order, copied, and cut from wider rows."""
    wide = width * (2 if column else 1)
    whole = torch.arange(sum(counts) * wide, dtype=torch.float32).view(sum(counts), wide)[:, :width]
    pieces = list(whole.split(counts))
    if shuffled:
        pieces.reverse()
    if copied:
        pieces[-1] = pieces[-1].clone()
    ours, theirs = FAST_PATH.module.rejoin(pieces), in_python(pieces)
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
        assert ours.data_ptr() == theirs.data_ptr()


@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=6), width=st.integers(0, 3))
def test_split_and_gather_undo_each_other(counts: list[int], width: int) -> None:
    """Pieces are views like torch's own; gathered they are the whole again, without a copy where possible."""
    whole = torch.randn(sum(counts), width)
    pieces = FAST_PATH.module.split(whole, counts, False)
    for ours, theirs in zip(pieces, whole.split_with_sizes(counts), strict=True):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
        assert ours.data_ptr() == theirs.data_ptr() and ours.shape == theirs.shape
    joined, rows = FAST_PATH.module.gather([(piece, None) for piece in pieces], 0, 1)
    assert rows == counts and torch.equal(joined, whole)
    apart = [(piece.clone(), None) for piece in pieces]
    assert torch.equal(FAST_PATH.module.gather(apart, 0, 1)[0], whole)


def test_split_refuses_counts_that_do_not_fit() -> None:
    """Too many or too few rows are an error, as in torch."""
    for counts in ([1, 1], [2, 2], [-1, 4]):
        with pytest.raises(ValueError, match="3 rows"):
            FAST_PATH.module.split(torch.randn(3, 2), counts, False)


def test_what_is_no_plain_tensor_is_left_to_python() -> None:
    """Subclasses, sparse tensors, conjugates and operands that need a graph."""

    class Marked(Tensor):
        """A tensor of somebody's own."""

    hot = FAST_PATH.module
    strange: list[Tensor] = [
        torch.randn(2, 2).as_subclass(Marked),
        torch.eye(2).to_sparse(),
        torch.randn(2, 2, dtype=torch.complex64).conj(),
        torch.randn(2, 2, requires_grad=True),
    ]
    for tensor in strange:
        assert hot.rejoin([tensor, tensor]) is NotImplemented
        assert hot.gather([(tensor,), (tensor,)], 0, 1) is NotImplemented
        assert hot.split(tensor, [1, 1], False) is NotImplemented


def test_the_modes_mask_is_pythons() -> None:
    """Grad, inference and deterministic mode; anything else is not the compiled twin's to judge."""
    hot = FAST_PATH.module
    assert hot.modes() == modes.capture().mask
    with torch.no_grad():
        assert hot.modes() == modes.capture().mask
    with torch.inference_mode():
        assert hot.modes() == modes.capture().mask
    torch.use_deterministic_algorithms(True)
    try:
        assert hot.modes() == modes.capture().mask
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.autocast("cpu"):
        assert hot.modes() == -1
    with torch.device("meta"):
        assert hot.modes() == -1
    with TorchDispatchMode():
        assert hot.modes() == -1
    seen: list[int] = []

    def inside(x: Tensor) -> Tensor:
        seen.append(hot.modes())
        return x

    torch.vmap(inside)(torch.zeros(2))
    assert seen == [-1]


def test_a_ticket_has_everything_that_pythons_has() -> None:
    """Fields, methods and the error of a wrong priority."""
    made = PENDING_CALL.cls("op", (1,), "g", 2.0, 3, 4, 0, 5.0, "modes", None)
    python = PendingCall("op", (1,), "g", 2.0, 3, 4, 0, 5.0, "modes", None)
    assert type(made) is FAST_PATH.module.PendingCall
    for name in (
        "op",
        "args",
        "batch_key",
        "expected_us",
        "tokens",
        "bytes",
        "priority",
        "deadline",
        "modes",
        "state",
    ):
        assert getattr(made, name) == getattr(python, name), name
    methods = {
        name for name, value in vars(PendingCall).items() if callable(value) and not name.startswith("__")
    }
    assert all(callable(getattr(made, name)) for name in methods)
    assert repr(made) == repr(python)
    wrongs: tuple[Any, ...] = (3, -1, "high", None)
    for wrong in wrongs:
        with pytest.raises(ValueError, match="priority needs 0, 1 or 2"):
            PENDING_CALL.cls("op", (), priority=wrong)
    gone = weakref.ref(made)
    made.args = (made,)
    del made
    gc.collect()
    assert gone() is None


WEIGHT = torch.randn(8, 8)


async def together(*rows: Tensor, **more: Any) -> list[Tensor]:
    """Every row through `linear` at the same time."""
    results = await asyncio.gather(*(lz.linear(row, WEIGHT, **more) for row in rows))
    return list(results)


def said() -> Selection:
    """The record of the last call but for its generation, which what loads in the background moves."""
    record = last_selection()
    assert record is not None
    return msgspec.structs.replace(record, version=0)


def known_calls() -> int:
    """How many calls of linear the memo knows."""
    function: Any = lz.linear
    cells = [cell.cell_contents for cell in function.__closure__]
    memo = next(cell for cell in cells if type(cell).__name__ == "AwaitedCallCache").entries
    size: int = memo.size
    return size


@pytest.mark.asyncio
async def test_a_known_call_gives_what_an_unknown_one_gives() -> None:
    """Found or not, positional or by name, the same bits and the same record."""
    rows = [torch.randn(1, 8) for _ in range(4)]
    with lz.start():
        first = await together(*rows)
        record = said()
        assert known_calls() == 1
        again = await together(*rows)
        by_name = await asyncio.gather(*(lz.linear(weight=WEIGHT, x=row) for row in rows))
        assert known_calls() == 1
        assert said() == record
    for one, two, three in zip(first, again, by_name, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)


@pytest.mark.asyncio
async def test_a_policy_is_seen_by_the_next_known_call() -> None:
    """A lock, a scope and a runtime's end each reach a call that was known before."""
    rows = [torch.randn(1, 8) for _ in range(4)]
    with lz.start():
        await together(*rows)
        lz.lock("linear", "reference.linear")
        await together(*rows)
        found = last_selection()
        assert found is not None and found.kernel == "reference.linear"
        lz.unlock("linear")
        await together(*rows)
        found = last_selection()
        assert found is not None and found.kernel != "reference.linear"
        with lz.prefer("reference", op="linear"):
            await together(*rows)
            found = last_selection()
            assert found is not None and found.kernel == "reference.linear"
        await together(*rows, backend="reference")
        found = last_selection()
        assert found is not None and found.kernel == "reference.linear"
    assert known_calls() == 0


@pytest.mark.asyncio
async def test_wrong_calls_say_what_python_says() -> None:
    """Unknown, missing and doubled arguments of an op whose good calls are known."""
    row = torch.randn(1, 8)
    with lz.start():
        await together(row, row)
        for args, kwargs in (((row,), {}), ((row, WEIGHT), {"wrong": 1}), ((row, WEIGHT), {"x": row})):
            with pytest.raises(TypeError, match="linear"):
                await lz.linear(*args, **kwargs)
        with pytest.raises(ValueError, match="last axis"):
            await lz.linear(torch.randn(1, 7), WEIGHT)
        with pytest.raises(ValueError, match="priority"):
            await asyncio.gather(*(lz.linear(row, WEIGHT, priority=7) for _ in range(2)))


NONSENSE: dict[str, tuple[tuple[Any, ...], type[BaseException] | None]] = {
    "resume": ((5,), TypeError),
    "begin": ((5,), None),
    "land": (([], 5, 5), None),
    "rejoin": (([5, None],), None),
    "gather": (([(torch.ones(1, 1),)], -1, 1), None),
    "split": ((torch.ones(3), [1, 2**63 - 1], False), ValueError),
    "own": ((5,), None),
    "columns": (([(), (5,)],), None),
    "queue": ((5, 5), None),
    "paired": ((5, 5), None),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_left_to_python_or_named(name: str) -> None:
    """No function of the module follows what is no object of the kind it is for."""
    given, error = NONSENSE[name]
    function = getattr(FAST_PATH.module, name)
    call = (
        function
        if name in ("land", "gather", "split", "queue", "paired")
        else lambda *args: function(args[0])
    )
    if error is None:
        assert call(*given) in (None, NotImplemented, False)
        return
    with pytest.raises(error):
        call(*given)


def test_a_ticket_without_a_context_is_not_entered() -> None:
    """What was given a waiter by hand, and nothing to wake it in, is named."""
    ticket = FAST_PATH.module.PendingCall("op", ())
    ticket.wake = print
    with pytest.raises(TypeError, match="needs a context"):
        FAST_PATH.module.resume(iter([ticket]))
    ticket.wake, ticket.context = print, 5
    with pytest.raises(TypeError, match="needs a context"):
        FAST_PATH.module.resume(iter([ticket]))


class Renamed:
    """A class that has lost the slots that the module wants."""

    __slots__ = ("other",)


class Computed:
    """A class whose attribute runs Python's code."""

    __slots__ = ("at_once",)

    @property
    def submitted(self) -> int:
        """How many."""
        return 0


CLASSES: tuple[type, ...] = (
    LoopDriver,
    Batcher,
    BatchQueue,
    ProgramPoint,
    Caller,
    BatchLimits,
    BatcherStats,
    RoundRobin,
    InlineRuns,
    GroupCosts,
)


@pytest.mark.parametrize("position", range(len(CLASSES)))
def test_a_renamed_slot_is_refused_and_nothing_queues_by_it(position: int) -> None:
    """Whichever class it is; what was in use before is not in use half."""
    classes = [*CLASSES[:position], Renamed, *CLASSES[position + 1 :]]
    front = object.__new__(LoopDriver)  # of which nothing may be read
    try:
        with pytest.raises(AttributeError, match="Renamed"):
            FAST_PATH.module.attributes(*classes)
        assert FAST_PATH.module.queue(front, FAST_PATH.module.PendingCall("op", (), "group")) is False
    finally:
        FAST_QUEUE.install(FAST_PATH.module)


def test_an_attribute_that_is_no_slot_is_refused() -> None:
    """A property would run Python's code in the middle of a change."""
    try:
        with pytest.raises(TypeError, match="submitted needs to be a slot"):
            FAST_PATH.module.attributes(*(Computed if kind is BatcherStats else kind for kind in CLASSES))
    finally:
        FAST_QUEUE.install(FAST_PATH.module)


def test_an_object_of_another_class_is_named_not_followed() -> None:
    """A lane whose counters are somebody else's: an error, and no memory is read as if they were its own."""
    loop = asyncio.new_event_loop()
    try:
        front = LoopDriver(loop, None, None)  # type: ignore[arg-type]
        front.stepping = Caller()
        group = front.batcher.round_robin.queues["group"] = BatchQueue("group", False)
        front.batcher.round_robin.add_point(group, None, 0)
        front.batcher.stats = Renamed()  # type: ignore[assignment]
        with pytest.raises(TypeError, match=r"submitted needs an object of .*BatcherStats.*, got .*Renamed"):
            FAST_PATH.module.queue(front, FAST_PATH.module.PendingCall("op", (), "group"))
    finally:
        loop.close()


def test_no_call_queues_by_code_that_was_turned_off() -> None:
    """The compiled way goes with its module; Python's answer is that it did not queue."""
    by_compiled_code = FAST_QUEUE.try_submit
    FAST_PATH.use(None)
    nothing: Any = None
    assert FAST_QUEUE.try_submit is not by_compiled_code
    assert FAST_QUEUE.try_submit(nothing, nothing) is False
