"""A function over rows behaves in a batcher like an op: shared runs, one culprit, cancellation, own rows."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.runtime import Runtime
from tests.native.twins import both_paths as both_paths


class Model:
    """Counts its runs and who came together."""

    def __init__(self) -> None:
        self.runs: list[list[int]] = []
        self.weight = torch.randn(4, 4)

    def step(self, x: torch.Tensor, handles: list[str], counts: list[int]) -> tuple[torch.Tensor, list[str]]:
        self.runs.append(counts)
        return x @ self.weight, [handle.upper() for handle in handles]

    def picky(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.append([x.shape[0]])
        if bool((x < 0).any()):
            raise ValueError("x needs values of at least 0")
        return x + 1


async def gather(*calls: Any) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)


def runtime() -> Any:
    return lz.start(lz.Settings(), scoped=True)


@pytest.mark.asyncio
async def test_concurrent_calls_share_one_run() -> None:
    """Rows stand behind each other, handles come as a list, results go back to their callers."""
    model = Model()
    inputs = [torch.randn(1 + i % 3, 4) for i in range(16)]
    async with runtime():
        outs = await gather(*[lz.batched(model.step)(x, f"h{i}") for i, x in enumerate(inputs)])
    assert model.runs == [[x.shape[0] for x in inputs]]
    for i, (x, (y, handle)) in enumerate(zip(inputs, outs, strict=True)):
        torch.testing.assert_close(y, x @ model.weight)
        assert handle == f"H{i}"


@pytest.mark.asyncio
async def test_two_objects_never_share_a_run() -> None:
    """A method is keyed by its function and its instance."""
    first, second = Model(), Model()
    async with runtime():
        await gather(*[lz.batched(m.step)(torch.randn(1, 4), "h") for m in (first, second) for _ in range(4)])
    assert first.runs == [[1] * 4] and second.runs == [[1] * 4]


@pytest.mark.asyncio
async def test_one_bad_caller_of_a_pure_function_fails_alone() -> None:
    """The batch is bisected; 15 neighbours get their rows."""
    model = Model()
    inputs = [torch.full((1, 4), float(i)) for i in range(16)]
    inputs[5] = -inputs[5]
    async with runtime():
        outs = await gather(*[lz.batched(model.picky, pure=True)(x) for x in inputs])
    assert isinstance(outs[5], ValueError)
    assert all(torch.equal(o, x + 1) for i, (x, o) in enumerate(zip(inputs, outs, strict=True)) if i != 5)


@pytest.mark.asyncio
async def test_an_impure_function_is_never_repeated() -> None:
    """Without `pure=True` everybody of the batch gets the error, and the function ran once."""
    model = Model()
    inputs = [torch.full((1, 4), float(i - 3)) for i in range(8)]
    async with runtime():
        outs = await gather(*[lz.batched(model.picky)(x) for x in inputs])
    assert all(isinstance(o, ValueError) for o in outs)
    assert model.runs == [[8]]


@pytest.mark.asyncio
async def test_a_cancelled_caller_leaves_before_the_run() -> None:
    """Its rows are not computed."""
    model = Model()
    async with runtime():
        step = lz.batched(model.step)
        tasks = [asyncio.ensure_future(step(torch.randn(1, 4), "h")) for _ in range(6)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await gather(*tasks)
    assert sum(len(run) for run in model.runs) == 5


def total(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


def largest(x: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([part.amax() for part in x.split(counts)]), x * 2


@pytest.mark.asyncio
async def test_a_tensor_may_have_one_row_a_caller() -> None:
    """Callers with several rows each get the one that is theirs, beside what has a row for each of theirs."""
    async with runtime():
        call = lz.batched(largest)
        rows = [torch.full((count, 2), float(count)) for count in (1, 2, 3)]
        found = await gather(*(call(x) for x in rows))
    for x, (most, double) in zip(rows, found, strict=True):
        assert most.tolist() == [float(len(x))]
        assert torch.equal(double, x * 2)


@pytest.mark.asyncio
async def test_wrong_functions_and_results_are_named() -> None:
    """Lambdas, coroutine functions, lost rows and ragged arguments say what they need."""
    with pytest.raises(TypeError, match="name that outlives one call"):
        lz.batched(lambda x: x)
    with pytest.raises(TypeError, match="coroutine function gather"):
        lz.batched(gather)
    with pytest.raises(TypeError, match="fn needs a function, got int"):
        lz.batched(3)  # type: ignore[call-overload]
    async with runtime():
        with pytest.raises(ValueError, match="total needs to return tensors of 3 rows"):
            await lz.batched(total)(torch.ones(3, 4))
        model = Model()
        with pytest.raises(ValueError, match="needs 2 rows in argument 1, got 3"):
            await lz.batched(model.step)(torch.ones(2, 4), torch.ones(3, 4))


@pytest.mark.asyncio
async def test_a_lone_caller_runs_inline_once_the_cost_is_known() -> None:
    """Cheap functions stop going through the worker thread after the first run."""
    model = Model()
    async with runtime() as opened:
        own: Runtime = opened
        step = lz.batched(model.step)
        for _ in range(40):
            await step(torch.ones(1, 4), "h")
        submitted = own.device("cpu").loop_drivers.stats().submitted
    assert len(model.runs) == 40
    assert submitted < 40


def exhausted(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] < 2:
        return x
    raise StopIteration("no more")


@pytest.mark.asyncio
async def test_a_function_that_raises_stop_iteration_returns_nothing() -> None:
    """It is an error like another, for a crowd, for callers of a known kind and for one alone."""
    call = lz.batched(exhausted)
    async with lz.start(lz.Settings()):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the call raised StopIteration"):
                await call(torch.ones(2, 4))
        await gather(*(call(torch.ones(1, 4)) for _ in range(3)))
        await gather(*(call(torch.ones(1, 4)) for _ in range(3)))
        outs = await gather(*(call(torch.ones(2, 4)) for _ in range(3)))
        outs += await gather(*(call(torch.ones(2, 4), priority=0) for _ in range(3)))
        with pytest.raises(RuntimeError, match="the call raised StopIteration"):
            await call(torch.ones(2, 4))
    for out in outs:
        assert isinstance(out, RuntimeError) and isinstance(out.__cause__, StopIteration), out
        assert str(out) == "the call raised StopIteration('no more')"


def sums(x: torch.Tensor, counts: list[int]) -> torch.Tensor:
    return torch.stack([part.sum() for part in x.split(counts)]).unsqueeze(-1)


@pytest.mark.asyncio
@pytest.mark.parametrize("scoped", [False, True])
@pytest.mark.parametrize("counts", [[2, 0], [0, 3, 1, 0], [1, 1, 0], [0, 0]])
async def test_a_caller_without_rows_takes_no_row_of_another(counts: list[int], scoped: bool) -> None:
    """Where a batch has as many rows as callers, the one of each caller is no row of who has none.

    Inside a scope no call goes the compiled path.
    """
    call = lz.batched(sums)
    rows = [torch.full((count, 2), float(index + 1)) for index, count in enumerate(counts)]
    async with lz.start(lz.Settings(), scoped=scoped):
        for _ in range(2):  # the second time from the compiled path's own cache
            outs = await gather(*(call(x) for x in rows))
            assert [out.tolist() for out in outs] == [[[float(x.sum())]] for x in rows]


@pytest.mark.asyncio
@pytest.mark.parametrize("priority", [2.0, 0.0, -1, 3, "1", None])
async def test_a_wrong_priority_is_its_callers_own_error(priority: Any) -> None:
    """It is named before it is in any queue: the neighbours get their answers."""
    weight = torch.randn(4, 4)
    async with runtime():
        for wrong in (lz.linear, lz.batched(torch.matmul, key="wrong priority")):
            right = [lz.linear(torch.randn(1, 4), weight) for _ in range(4)]
            error, *outs = await gather(wrong(torch.randn(4, 4), weight, priority=priority), *right)
            assert isinstance(error, ValueError) and str(error).startswith("priority needs 0, 1 or 2, got")
            assert all(isinstance(out, torch.Tensor) for out in outs)


def numbers(x: torch.Tensor) -> torch.Tensor:
    return x.dequantize()


@pytest.mark.asyncio
@pytest.mark.filterwarnings("ignore")  # torch deprecates them, once a process
async def test_rows_with_a_scale_of_their_own_join_no_others() -> None:
    """torch would put rows of another scale into the first one's, and cut off what that cannot hold."""
    values = [(1.0, 0.01), (100.0, 1.0), (5.0, 0.1)]
    rows = [torch.quantize_per_tensor(torch.full((2, 3), v), step, 0, torch.qint8) for v, step in values]
    async with runtime():
        outs = await gather(*(lz.batched(numbers)(x) for x in rows))
    assert [round(float(out.mean()), 3) for out in outs] == [1.0, 100.0, 5.0]


@pytest.mark.asyncio
@pytest.mark.filterwarnings("ignore")
async def test_tensors_without_plain_rows_are_refused_by_name() -> None:
    """A nested or a sparse one has none to join; its neighbours get theirs."""
    call = lz.batched(torch.neg, key="plain rows")
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    async with runtime():
        calls = [call(x) for x in (nested, torch.eye(3).to_sparse(), torch.ones(1, 3))]
        first, second, third = await gather(*calls)
    assert str(first) == "plain rows needs a strided tensor in argument 0, got a nested one"
    assert str(second) == "plain rows needs a strided tensor in argument 0, got layout torch.sparse_coo"
    assert torch.equal(third, -torch.ones(1, 3))


class Tagged(torch.Tensor):
    """Rows with a factor beside them, which nothing that torch makes of them has."""

    factor: float

    @classmethod
    def of(cls, factor: float) -> Tagged:
        """A row of ones with a factor."""
        made = torch.ones(1, 3).as_subclass(cls)
        made.factor = factor
        return made


@pytest.mark.asyncio
async def test_rows_of_a_subclass_join_no_others() -> None:
    """What it keeps beside its rows is each caller's own; those without any still meet."""
    runs: list[int] = []

    def grown(x: torch.Tensor) -> torch.Tensor:
        runs.append(len(x))
        return x.as_subclass(torch.Tensor) * getattr(x, "factor", 1.0)

    call = lz.batched(grown, key="grown")
    async with runtime():
        for _ in range(2):
            rows = [Tagged.of(2.0), Tagged.of(3.0), torch.ones(1, 3), torch.ones(1, 3)]
            found = await asyncio.gather(*[call(each) for each in rows])
            assert [float(each[0, 0]) for each in found] == [2.0, 3.0, 1.0, 1.0]
    assert sorted(runs) == [1] * 4 + [2] * 2
