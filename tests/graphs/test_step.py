"""A compiled step pads to its buckets and gives each call its own rows; on the CPU without a graph."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Literal

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import layerzero as lz
from layerzero.actors.device.local_device import LocalDevice
from layerzero.graphs.step import CudaGraph, GraphedFunction
from layerzero.ops import table as ops_table
from layerzero.runtime import Runtime, current, install, uninstall
from layerzero.selection.modes import capturing_mode_bits
from layerzero.spec.kernel import Kernel
from tests.kernels import kernel

WEIGHT = torch.linspace(0.5, 1.5, 8)


def norm(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Two results, each with a row a row."""
    y = lz.sync.rms_norm(x, WEIGHT) * scale
    return y, y.sum(-1)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=5))
def test_padding_changes_no_row(sizes: list[int]) -> None:
    """Whatever sizes follow each other, results are the function's own on those rows."""
    step = lz.compile(norm, buckets=(1, 3, 8))
    for rows in sizes:
        x, scale = torch.randn(rows, 8), torch.randn(rows, 1)
        for got, want in zip(step(x, scale), norm(x, scale), strict=True):
            assert torch.equal(got, want)
    assert step.captures <= 3


def test_padding_rows_hold_what_fill_says() -> None:
    """The function sees the bucket's rows: the caller's, then the fill of each argument."""
    seen: list[Tensor] = []

    def look(ids: Tensor, x: Tensor) -> Tensor:
        seen.append(torch.stack([ids, x]))
        return x

    step = lz.compile(look, buckets=(4,), fill={"ids": 9})
    step(torch.tensor([1, 2]), torch.tensor([5, 6]))
    assert seen[-1].tolist() == [[1, 2, 9, 9], [5, 6, 0, 0]]
    step(torch.tensor([3]), torch.tensor([7]))
    assert seen[-1].tolist() == [[3, 9, 9, 9], [7, 0, 0, 0]], "rows of an earlier call are gone"


def test_results_are_the_callers_own() -> None:
    """A later call does not write into what an earlier one returned."""
    step = lz.compile(lambda x: x * 2, buckets=(2,))
    first = step(torch.ones(2, 3))
    step(torch.full((2, 3), 5.0))
    assert torch.equal(first, torch.full((2, 3), 2.0))


def test_buckets_can_be_made_ready_ahead() -> None:
    """`capture` makes every bucket; calls then add none, other dtypes add their own."""
    step = lz.compile(lambda x: x + 1, buckets=(1, 2, 4))
    step.capture(torch.zeros(1, 3))
    assert step.captures == 3
    step(torch.zeros(3, 3))
    assert step.captures == 3
    step(torch.zeros(3, 3, dtype=torch.float64))
    assert step.captures == 4


def test_another_generation_is_captured_anew() -> None:
    """Plans inside a graph may be quarantined or denied: then it must not be replayed."""
    now = [1]
    step = GraphedFunction(lambda x: x + 1, buckets=(2,), version=lambda _: now[0])
    step(torch.zeros(2))
    step(torch.zeros(2))
    assert step.captures == 1
    now[0] = 2
    step(torch.zeros(2))
    assert step.captures == 2


def test_a_step_runs_under_any_mode() -> None:
    """Buffers made under inference mode serve calls outside it."""
    step = lz.compile(lambda x: x * 3, buckets=(2,))
    with torch.inference_mode():
        inside = step(torch.ones(2))
    assert torch.equal(step(torch.ones(2)), inside)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lz.compile(norm, buckets=()), "buckets needs"),
        (lambda: lz.compile(norm, buckets=(0, 2)), "at least 1"),
        (lambda: lz.compile(norm, max_graphs=0), "max_graphs needs an int >= 1, got 0"),
        (lambda: lz.compile(norm, fill={"y": 1}), "among x, scale, got y"),
        (lambda: lz.compile(norm, buckets=(2,))(torch.ones(3, 8), torch.ones(3, 1)), "at most 2 rows, got 3"),
        (lambda: lz.compile(norm)(torch.ones(3, 8), torch.ones(2, 1)), "as many rows"),
        (lambda: lz.compile(norm)(torch.ones(3, 8)), "rows for x, scale"),
        (lambda: lz.compile(lambda x: x)(torch.ones(2, requires_grad=True)), "without a gradient"),
        (lambda: lz.compile(lambda x: x.sum(), buckets=(2,))(torch.ones(2)), "results of 2 rows"),
        (lambda: lz.compile(lambda x: 3, buckets=(2,))(torch.ones(2)), "return tensors, got int"),
    ],
)
def test_what_does_not_fit_is_named(call: object, message: str) -> None:
    """The error says which argument, what it needs and what it got."""
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.asyncio
async def test_a_compiled_step_batches_across_coroutines() -> None:
    """Calls of many tasks become one padded run, and each gets its rows."""
    runs: list[int] = []

    def doubled(x: Tensor) -> Tensor:
        runs.append(len(x))
        return x * 2

    awaited = lz.batched(lz.compile(doubled, buckets=(4, 8)), key="doubled")
    rows = [torch.full((1, 3), float(i)) for i in range(6)]
    results = await asyncio.gather(*(awaited(row) for row in rows))
    assert all(torch.equal(got, row * 2) for got, row in zip(results, rows, strict=True))
    assert set(runs) <= {4, 8} and len(runs) < 2 * len(rows)


def test_a_step_of_many_shapes_keeps_no_more_than_its_bound() -> None:
    """The least recently used of too many captured steps go; what comes again is captured again."""
    step = lz.compile(lambda x: x * 2, buckets=(2,), max_graphs=3)
    for width in range(1, 1001):
        assert torch.equal(step(torch.ones(2, width)), torch.full((2, width), 2.0))
    assert step.captures == 1000 and step.evictions == 997
    step(torch.ones(2, 1000))
    step(torch.ones(2, 998))
    assert step.captures == 1000, "the last three are there"
    step(torch.ones(2, 997))
    assert step.captures == 1001


class Capture:
    """A GPU's capture, and nothing else of a GPU: `between` happens when the first one begins."""

    on = False

    def __init__(self, between: Callable[[], object]) -> None:
        self.between = between

    def __call__(self, *_: object, **__: object) -> Capture:
        return self

    def __enter__(self) -> None:
        between, self.between = self.between, lambda: None
        between()
        Capture.on = True

    def __exit__(self, *_: object) -> None:
        Capture.on = False


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., lz.Runtime]]:
    """Opens a runtime whose CPU is captured like a GPU, with `between(device)` after the first rehearsal."""
    opened: list[lz.Runtime] = []

    def make(
        between: Callable[[LocalDevice], object],
        kernels: Callable[[], list[Kernel]] = kernels,
        warm: Literal["background", "off"] = "off",
    ) -> lz.Runtime:
        settings = lz.Settings(warm=warm, perfdb=None, shipped_tables=False)
        runtime = Runtime(settings, kernels=kernels)
        install(runtime)
        opened.append(runtime)
        device = runtime.device("cpu")
        device.mode = capturing_mode_bits
        capture, stream = Capture(lambda: between(device)), SimpleNamespace(wait_stream=lambda _: None)
        monkeypatch.setattr("layerzero.selection.modes._is_capturing", lambda: Capture.on)
        monkeypatch.setattr("layerzero.graphs.step.EagerStep", CudaGraph)
        for name in ("Stream", "current_stream"):
            monkeypatch.setattr(f"torch.cuda.{name}", lambda *_: stream)
        monkeypatch.setattr("torch.cuda.stream", lambda _: contextlib.nullcontext())
        monkeypatch.setattr("torch.cuda.CUDAGraph", lambda: SimpleNamespace(pool=object, replay=lambda: None))
        monkeypatch.setattr("torch.cuda.graph", capture)
        return runtime

    yield make
    Capture.on = False
    for runtime in opened:
        uninstall(runtime)
        runtime.close()


RAN: list[str] = []


def noting(name: str) -> Callable[..., Tensor]:
    """The reference of rms_norm, which says who it is."""

    def run(*args: object) -> Tensor:
        RAN.append(name)
        result: Tensor = ops_table.get("rms_norm").reference(*args)
        return result

    return run


def kernels() -> list[Kernel]:
    """One that is there, and a better one that has to be loaded; a third that must not be captured."""
    return [
        kernel("there.rms_norm", noting("there"), launch_us=50.0, graph_safe=True),
        kernel("better.rms_norm", noting("better"), launch_us=1.0, graph_safe=True, cold=True),
        kernel("unsafe.rms_norm", noting("unsafe"), launch_us=0.1),
    ]


def free(x: Tensor) -> Tensor:
    """A step of one call."""
    return lz.sync.rms_norm(x, WEIGHT)


def preferring(x: Tensor) -> Tensor:
    """A step with a rule of its own."""
    with lz.prefer("there", op="linear"):
        return lz.sync.rms_norm(x, WEIGHT)


def of_one_backend(x: Tensor) -> Tensor:
    """A step whose call names its backend."""
    return lz.sync.rms_norm(x, WEIGHT, backend="there")


@pytest.mark.parametrize("fn", [free, preferring, of_one_backend])
def test_a_kernel_that_loads_between_rehearsal_and_capture_leaves_the_capture_its_plan(
    captured: Callable[..., lz.Runtime], fn: Callable[[Tensor], Tensor]
) -> None:
    """The capture takes what was rehearsed; the next call captures anew, with what has been loaded."""
    captured(lambda device: device.warm(["better.rms_norm"]))
    step, x = lz.compile(fn, buckets=(2,)), torch.randn(2, 8)
    RAN.clear()
    step(x)
    assert set(RAN) == {"there"}
    RAN.clear()
    step(x)
    assert step.captures == 2 and set(RAN) == {"there" if fn is of_one_backend else "better"}
    step(x)
    assert step.captures == 2, "nothing has changed since"


def change_limits(runtime: lz.Runtime) -> None:
    """A bound of the batcher."""
    runtime.reconfigure(msgspec.structs.replace(runtime.settings, max_batch_size=7))


def load_for_another_op(runtime: lz.Runtime) -> None:
    """A kernel that the step could not use."""
    runtime.add_kernel(kernel("other.layer_norm"))


def call_in_a_block(runtime: lz.Runtime) -> None:
    """A setting, and behind it a call under a policy of its own, beside the step."""
    change_limits(runtime)
    with lz.prefer("there", op="rms_norm"):
        lz.sync.rms_norm(torch.randn(3, 8), WEIGHT)


@pytest.mark.parametrize("change", [change_limits, load_for_another_op, call_in_a_block])
def test_what_concerns_no_op_of_a_step_leaves_it_captured(
    captured: Callable[..., lz.Runtime], change: Callable[[lz.Runtime], None]
) -> None:
    """A server captures dozens of steps: it does not capture all of them again for a setting, or a kernel of
    another op that has been loaded behind calls."""
    runtime = captured(lambda _: None)
    step, x = lz.compile(free, buckets=(2,)), torch.randn(2, 8)
    step(x)
    version = runtime.device("cpu").dispatch_version
    change(runtime)
    step(x)
    assert runtime.device("cpu").dispatch_version > version
    assert step.captures == 1


def test_a_step_under_a_policy_that_is_forgotten_is_captured_anew(
    captured: Callable[..., lz.Runtime],
) -> None:
    """Of many policies in blocks some are forgotten, and with them what would tell of their changes."""
    captured(lambda _: None)
    step, x = lz.compile(preferring, buckets=(2,)), torch.randn(2, 8)
    step(x)
    for number in range(70):
        with lz.prefer(f"there_{number}", op="linear*"):
            lz.sync.rms_norm(torch.randn(3, 8), WEIGHT)
    step(x)
    assert step.captures == 2
    step(x)
    assert step.captures == 2


def test_a_better_kernel_of_its_op_is_captured(captured: Callable[..., lz.Runtime]) -> None:
    """Loaded behind calls, it takes the other's place in the next capture."""
    runtime = captured(lambda _: None)
    step, x = lz.compile(free, buckets=(2,)), torch.randn(2, 8)
    step(x)
    runtime.device("cpu").warm(["better.rms_norm"])
    RAN.clear()
    step(x)
    assert step.captures == 2 and set(RAN) == {"better"}


@pytest.mark.parametrize("guard", [True, False])
def test_a_bound_kernel_that_may_no_longer_run_is_captured_no_longer(
    captured: Callable[..., lz.Runtime], guard: bool
) -> None:
    """A step over a bound callable follows what is denied, guarded or not."""
    captured(lambda _: None)
    bound = lz.bind("rms_norm", torch.randn(2, 8), WEIGHT, guard=guard)
    step = lz.compile(lambda x: bound(x, WEIGHT), buckets=(2,))
    step(torch.randn(2, 8))
    captures = step.captures
    lz.lock("rms_norm", "better.rms_norm")
    step(torch.randn(2, 8))
    assert step.captures == captures + 1


def test_a_planned_block_that_would_be_another_is_captured_anew(captured: Callable[..., lz.Runtime]) -> None:
    """A block's kernels are no calls of their own: its step follows what is locked all the same."""
    captured(lambda _: None)
    with torch.no_grad():
        planned = lz.plan(free, torch.randn(2, 8))
    step = lz.compile(lambda x: planned(x), buckets=(2,))
    step(torch.randn(2, 8))
    captures = step.captures
    lz.lock("rms_norm", "better.rms_norm")
    RAN.clear()
    step(torch.randn(2, 8))
    assert step.captures == captures + 1 and set(RAN) == {"better"}


class Slow:
    """Kernels of which the only one that may be captured takes as long to load as the test wants."""

    def __init__(self) -> None:
        self.asked, self.release = threading.Event(), threading.Event()

    def load(self) -> Callable[..., Tensor]:
        self.asked.set()
        assert self.release.wait(20.0)
        return noting("slow")

    def kernels(self) -> list[Kernel]:
        return [
            kernel("plain.rms_norm", noting("plain"), launch_us=50.0),
            kernel("slow.rms_norm", load=self.load, graph_safe=True, cold=True),
        ]


def test_a_step_whose_kernel_is_still_loading_runs_without_a_graph(
    captured: Callable[..., lz.Runtime],
) -> None:
    """No call waits for a compiler: it runs on what is there, is counted, and is captured behind the load."""
    slow = Slow()
    device = captured(lambda _: None, slow.kernels, "background").device("cpu")
    step, x = lz.compile(free, buckets=(4,)), torch.randn(2, 8)
    RAN.clear()
    first = step(x)
    assert slow.asked.wait(60.0) and not slow.release.is_set()
    assert torch.equal(step(x), first) and set(RAN) == {"plain"} and step.captures == 0
    assert device.counters.total("graph_uncaptured_calls") == 2
    slow.release.set()
    device.loader._thread.close(60.0)
    RAN.clear()
    torch.testing.assert_close(step(x), first)
    assert step.captures == 1 and set(RAN) == {"slow"}
    assert device.counters.total("graph_uncaptured_calls") == 2


def test_a_capture_that_is_asked_for_waits_for_its_kernel(captured: Callable[..., lz.Runtime]) -> None:
    """`capture` makes ready, however long a load takes."""
    slow = Slow()
    captured(lambda _: None, slow.kernels, "background")
    step = lz.compile(free, buckets=(2,))

    def let_load() -> None:
        slow.asked.wait(60.0)
        slow.release.set()

    helper = threading.Thread(target=let_load)
    helper.start()
    step.capture(torch.randn(1, 8))
    helper.join()
    assert step.captures == 1


def test_many_changes_between_rehearsal_and_capture_leave_it_its_plan(
    captured: Callable[..., lz.Runtime],
) -> None:
    """Several generations may have passed, and rules of other ops have come."""

    def between(device: LocalDevice) -> None:
        for name in ("linear", "mlp"):
            lz.add_policy(prefer="there", op=name)
            device.registry.add(kernel(f"late_{name}.rms_norm", launch_us=900.0))
            device.refresh()

    captured(between)
    RAN.clear()
    lz.compile(free, buckets=(2,))(torch.randn(2, 8))
    assert set(RAN) == {"there"}


@pytest.mark.parametrize("how", ["quarantine", "denied", "replaced", "replaced later", "removed"])
def test_a_rehearsed_kernel_that_may_no_longer_run_is_not_captured(
    captured: Callable[..., lz.Runtime], how: str
) -> None:
    """Out of service, denied, exchanged or gone since: the capture is refused by name."""

    def between(device: LocalDevice) -> None:
        if how == "quarantine":
            device.health.quarantine("there.rms_norm", "it lied")
        elif how == "denied":
            lz.add_policy(deny="there.rms_norm")
        elif how.startswith("replaced"):
            if how == "replaced later":
                lz.add_policy(prefer="there", op="rms_norm")  # a generation between, in which nobody calls
            device.registry.replace(kernel("there.rms_norm", noting("other"), graph_safe=True))
            device.refresh()
        else:
            current().remove_kernel("there.rms_norm")

    captured(between)
    with pytest.raises(lz.CudaGraphUnsafeError, match="needs a plan from before it"):
        lz.compile(free, buckets=(2,))(torch.randn(2, 8))


def test_a_call_that_was_never_rehearsed_is_refused(captured: Callable[..., lz.Runtime]) -> None:
    """Inside a capture nothing is chosen: another shape than the rehearsed ones has no plan."""
    captured(lambda device: None)

    def other(x: Tensor) -> Tensor:
        return lz.sync.rms_norm(x if not Capture.on else x.repeat(3, 1), WEIGHT)[:2]

    lz.compile(free, buckets=(2,))(torch.randn(2, 8))
    with pytest.raises(lz.CudaGraphUnsafeError, match="needs a plan from before it"):
        lz.compile(other, buckets=(2,))(torch.randn(2, 8))
