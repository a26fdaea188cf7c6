"""Batches that the compiled twin runs in one step: what it may answer, and when Python has to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.native import FAST_PATH, is_product
from layerzero.ops import table as ops_table
from layerzero.scheduler.batch_executor import BatchExecutor, MergedCalls
from layerzero.scheduler.modes.torch_modes import capture
from tests.kernels import kernel

WIDTH, CALLERS = 8, 4


@pytest.fixture
def runtime() -> Iterator[lz.Runtime]:
    """A runtime of the test's own, with the compiled twin."""
    FAST_PATH.load()
    with lz.start(lz.Settings(device="cpu", inference=True)) as opened, torch.no_grad():
        yield opened


def executor_of(runtime: lz.Runtime) -> BatchExecutor:
    """A new executor of batches on the CPU's device."""
    return BatchExecutor(runtime.device("cpu"))


def rows(weight: Tensor, callers: int = CALLERS) -> list[tuple[Any, ...]]:
    """Calls of rms_norm that share a weight."""
    return [(torch.randn(1, WIDTH), weight, 1e-6) for _ in range(callers)]


def known(executor: BatchExecutor, calls: list[tuple[Any, ...]], op: str = "rms_norm") -> bool:
    """Whether the twin answers a batch of these calls by itself."""
    merged = executor._merged.get(ops_table.get(op))
    assert isinstance(merged, MergedCalls)
    return merged.run(calls, _inference()) is not None


def _inference() -> Any:
    with torch.inference_mode():
        return capture()


def executed(executor: BatchExecutor, calls: list[tuple[Any, ...]], op: str = "rms_norm") -> list[Any]:
    """The values of a batch, each with its plan."""
    return executor.execute(ops_table.get(op), calls, capture(), None)


def test_the_second_batch_is_answered_without_python(runtime: lz.Runtime) -> None:
    """With the same values and the same plan as the first, for each number of rows by itself."""
    executor, weight = executor_of(runtime), torch.randn(WIDTH)
    first = executed(executor, rows(weight))
    calls = rows(weight)
    assert known(executor, calls) and not known(executor, rows(weight, CALLERS + 1))
    outcomes = executed(executor, calls)
    for (value, plan), (x, _, eps) in zip(outcomes, calls, strict=True):
        torch.testing.assert_close(value, torch.nn.functional.rms_norm(x, (WIDTH,), weight, eps))
        assert plan is first[0][1]


def test_calls_of_several_weights_are_answered_without_python(runtime: lz.Runtime) -> None:
    """In whatever order their weights come, of as many rows as each brings, and by no neighbour's weight."""
    executor = executor_of(runtime)
    own = [torch.randn(5, WIDTH) for _ in range(3)]

    def calls() -> list[tuple[Any, ...]]:
        return [(torch.randn(1 + n % 2, WIDTH), own[n % 3], None) for n in (0, 1, 2, 4, 3, 6, 1, 5)]

    executed(executor, calls(), "linear")
    given = calls()
    assert known(executor, given, "linear")
    for (value, _), (x, weight, _) in zip(executed(executor, given, "linear"), given, strict=True):
        torch.testing.assert_close(value, torch.nn.functional.linear(x, weight))
    more = [*given, (torch.randn(9, WIDTH), own[0], None)]
    assert not known(executor, more, "linear")  # one product is new: nothing has run
    for (value, _), (x, weight, _) in zip(executed(executor, more, "linear"), more, strict=True):
        torch.testing.assert_close(value, torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("width", [16, 512])  # less than a thread is worth, and more
def test_products_of_several_weights_are_one_launch(runtime: lz.Runtime, threads: int, width: int) -> None:
    """Rows are put together once, in the order of their weights, and all results are pieces of one tensor."""
    executor, before = executor_of(runtime), torch.get_num_threads()
    own = [torch.randn(width, width) / width**0.5 for _ in range(5)]

    def calls(bias: Tensor | None = None) -> list[tuple[Any, ...]]:
        return [(torch.randn(1 + n % 3, width), own[n % 5], bias) for n in (3, 0, 1, 2, 4, 6, 5, 11, 9, 10)]

    def launched(given: list[tuple[Any, ...]]) -> int:
        outcomes = executed(executor, given, "linear")
        for (value, plan), (x, weight, bias) in zip(outcomes, given, strict=True):
            torch.testing.assert_close(value, torch.nn.functional.linear(x, weight, bias))
            assert plan.request.dim("N") == sum(len(other) for other, w, _ in given if w is weight)
        return len({value.untyped_storage().data_ptr() for value, _ in outcomes})

    torch.set_num_threads(threads)
    lz.lock("linear", "torch.linear.native")  # whatever else this CPU has
    try:
        assert launched(calls()) == len(own)  # nothing is known yet
        for _ in range(100):  # a kernel that loads meanwhile has all be asked anew
            if launched(calls()) == 1:
                break
            time.sleep(0.05)
        else:
            pytest.fail("never one launch")
        bias = torch.randn(width)
        assert [launched(calls(bias)), launched(calls(bias))] == [len(own), len(own)]
    finally:
        lz.unlock("linear")
        torch.set_num_threads(before)


@pytest.mark.parametrize("how", ["once", "not now", "broken"])
def test_a_kernel_runs_products_of_several_weights_by_its_own_function(
    runtime: lz.Runtime, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One launch, each call with its own weight's rows and plan; else a launch for each weight.

    That its function raised is counted and told.
    """
    executor, own, launches = executor_of(runtime), [torch.randn(16, 16) for _ in range(5)], list[str]()

    def alone(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        launches.append("alone")
        return torch.nn.functional.linear(x, weight, bias)

    def grouped(x: Tensor, counts: list[int], weights: list[Tensor]) -> Tensor | None:
        launches.append("grouped")
        if how == "broken":
            raise RuntimeError("out of order")
        parts = x.split(counts) if how == "once" else ()
        products = [part @ weight.t() for part, weight in zip(parts, weights, strict=bool(parts))]
        return torch.cat(products) if products else None

    def calls() -> list[tuple[Any, ...]]:
        return [(torch.randn(1 + n % 3, 16), own[n % 5], None) for n in (3, 0, 1, 2, 4, 6, 5, 11, 9, 10)]

    runtime.add_kernel(kernel("t.linear.grouped", is_product(alone, grouped)))
    lz.lock("linear", "t.linear.grouped")
    try:
        for _ in range(100):  # a kernel that loads meanwhile has all be asked anew
            launches.clear()
            given = calls()
            for (value, plan), (x, weight, _) in zip(executed(executor, given, "linear"), given, strict=True):
                torch.testing.assert_close(value, torch.nn.functional.linear(x, weight))
                assert plan.request.dim("N") == sum(len(other) for other, w, _ in given if w is weight)
            if "grouped" in launches:
                break
            time.sleep(0.05)
        assert launches == ["grouped"] + ([] if how == "once" else ["alone"] * len(own))
        counted = runtime.counters.snapshot().items()
        failures = {series.labels: n for series, n in counted if series.name == "fallbacks" and n}
        labels = (("kernel", "t.linear.grouped"), ("reason", "RuntimeError"))
        assert failures == ({labels: 1} if how == "broken" else {})
        told = [record.getMessage() for record in caplog.records if "kernel.fell_back" in record.getMessage()]
        assert len(told) == (how == "broken") and all("out of order" in each for each in told)
    finally:
        lz.unlock("linear")


def test_several_operands_and_outputs_are_joined_and_taken_apart(runtime: lz.Runtime) -> None:
    """`add_rms_norm` joins x and residual, and gives a pair to each caller."""
    executor, weight = executor_of(runtime), torch.randn(WIDTH)
    calls, outcomes = [], []
    for _ in range(2):
        calls = [(torch.randn(n, WIDTH), torch.randn(n, WIDTH), weight, 1e-6) for n in (1, 2, 3)]
        outcomes = executed(executor, calls, "add_rms_norm")
    assert known(executor, calls, "add_rms_norm")
    for (value, _), (x, residual, _, eps) in zip(outcomes, calls, strict=True):
        torch.testing.assert_close(value[1], x + residual)
        torch.testing.assert_close(
            value[0], torch.nn.functional.rms_norm(x + residual, (WIDTH,), weight, eps)
        )


def test_what_differs_is_pythons(runtime: lz.Runtime) -> None:
    """Another weight behind one address of Python's, strides, dtypes, an empty list: nothing of it is run."""
    executor, weight = executor_of(runtime), torch.randn(WIDTH)
    executed(executor, rows(weight))
    calls = rows(weight)
    assert known(executor, calls)
    other = (*calls[:-1], (calls[-1][0], torch.randn(WIDTH), 1e-6))
    assert not known(executor, list(other))
    assert not known(executor, [(x.double(), w.double(), eps) for x, w, eps in calls])
    assert not known(executor, [(x, w[::1].view(1, WIDTH), eps) for x, w, eps in calls])
    assert not known(executor, [(x, w, 1e-5) for x, w, _ in calls])
    assert not known(executor, calls[:1]) and not known(executor, [])
    assert not known(executor, [(x[0], w, eps) for x, w, eps in calls])


def test_a_new_generation_of_the_device_is_asked_anew(runtime: lz.Runtime) -> None:
    """A kernel that is locked later serves the batches that follow."""
    executor, weight = executor_of(runtime), torch.randn(WIDTH)
    for _ in range(2):
        executed(executor, rows(weight))
    assert known(executor, rows(weight))
    runtime.add_kernel(
        kernel("t.rms_norm.marked", lambda x, weight, eps: torch.full_like(x, 7.0), launch_us=1.0)
    )
    lz.lock("rms_norm", "t.rms_norm.marked")
    try:
        assert not known(executor, rows(weight))
        assert all(float(value[0, 0]) == 7.0 for value, _ in executed(executor, rows(weight)))
    finally:
        lz.unlock("rms_norm")


def test_a_kernel_that_raises_is_followed_by_the_next_one(runtime: lz.Runtime) -> None:
    """In a batch of the twin's too: the callers get the next kernel's values, and its plan."""
    state = {"broken": False}

    def fragile(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if state["broken"]:
            raise RuntimeError("out of order")
        return torch.nn.functional.rms_norm(x, (WIDTH,), weight, eps)

    runtime.add_kernel(kernel("t.rms_norm.fragile", fragile, launch_us=1e-6))
    executor, weight = executor_of(runtime), torch.randn(WIDTH)
    outcomes = []
    for _ in range(2):
        outcomes = executed(executor, rows(weight))
    assert outcomes[0][1].kernel == "t.rms_norm.fragile"
    calls = rows(weight)
    assert known(executor, calls)
    state["broken"] = True
    outcomes = executed(executor, calls)
    for (value, plan), (x, _, eps) in zip(outcomes, calls, strict=True):
        torch.testing.assert_close(value, torch.nn.functional.rms_norm(x, (WIDTH,), weight, eps))
        assert plan.kernel != "t.rms_norm.fragile"


@pytest.mark.asyncio
async def test_awaited_callers_get_what_python_alone_gives(runtime: lz.Runtime) -> None:
    """Rows of one to three each, some of one tensor: the same values with the twin's batches and without."""
    weight = torch.randn(WIDTH, WIDTH)
    given = [torch.randn(1 + n % 3, WIDTH) for n in range(7)]
    values: list[torch.Tensor] = []
    for _ in range(4):
        values = await asyncio.gather(*(lz.linear(x, weight) for x in given))
    for value, x in zip(values, given, strict=True):
        torch.testing.assert_close(value, torch.nn.functional.linear(x, weight))
