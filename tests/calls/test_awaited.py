"""What awaiting an op means: modes, batches, one bad caller, cancellation, gradients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch
from torch.overrides import TorchFunctionMode

import layerzero as lz
import layerzero.sync
from layerzero.actors.device.local_device import LocalDevice
from layerzero.runtime import Runtime
from tests.clocks import run_virtually
from tests.native.twins import both_paths as both_paths

WEIGHT = torch.randn(8, 16)


@pytest_asyncio.fixture
async def runtime() -> AsyncIterator[Runtime]:
    """A runtime of the test's own; awaits go through the batcher's worker thread as well."""
    async with lz.start(lz.Settings(inline_limit_us=20.0, warm="off")) as opened:
        yield opened


def sizes(runtime: Runtime) -> dict[int, int]:
    found: dict[int, int] = runtime.device("cpu").loop_drivers.stats().sizes
    return found


@pytest.mark.asyncio
async def test_concurrent_callers_share_a_launch(runtime: Runtime) -> None:
    """64 callers with one weight become one batch, and each gets its own rows."""
    inputs = [torch.randn(1 + i % 3, 16) for i in range(64)]
    outs = await asyncio.gather(*[lz.linear(x, WEIGHT) for x in inputs])
    for x, out in zip(inputs, outs, strict=True):
        torch.testing.assert_close(out, torch.nn.functional.linear(x, WEIGHT))
    assert sizes(runtime) == {64: 1}


@pytest.mark.asyncio
async def test_a_kernel_that_finishes_loading_meanwhile_sets_nobody_apart(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generation that begins while a call is planned is not a policy of that caller's own."""
    plan, planned = LocalDevice.plan, list[int]()

    def slowly(own: LocalDevice, *args: Any) -> Any:
        found = plan(own, *args)
        planned.append(len(planned))
        if len(planned) in (1, 5):
            own.refresh()  # what the background thread does when a kernel has been loaded
        return found

    monkeypatch.setattr(LocalDevice, "plan", slowly)
    await asyncio.gather(*[lz.linear(torch.randn(rows, 16), WEIGHT) for rows in range(1, 9)])
    assert len(planned) >= 8, "each of these calls is new"
    assert sizes(runtime) == {8: 1}


@pytest.mark.asyncio
async def test_last_selection_names_the_merged_request(runtime: Runtime) -> None:
    """The record is of what was executed: 64 rows, not the caller's one."""

    async def one() -> lz.Selection | None:
        await lz.linear(torch.randn(1, 16), WEIGHT)
        return lz.last_selection()

    records = await asyncio.gather(*[one() for _ in range(64)])
    assert {r.request.dims["N"] for r in records if r is not None} == {64}
    assert lz.which("linear", torch.randn(1, 16), WEIGHT, batch=64) == records[0].kernel  # type: ignore[union-attr]


@pytest.mark.asyncio
async def test_one_poisoned_caller_fails_alone(runtime: Runtime) -> None:
    """63 neighbours of a bad id get their rows; the culprit gets the error that names it."""
    table = torch.randn(10, 4)
    ids = [torch.tensor([i % 10]) for i in range(64)]
    ids[17] = torch.tensor([10])
    outs = await asyncio.gather(*[lz.embedding(i, table) for i in ids], return_exceptions=True)
    assert isinstance(outs[17], ValueError) and "ids" in str(outs[17])
    good = [out for i, out in enumerate(outs) if i != 17]
    assert all(isinstance(out, torch.Tensor) for out in good)
    assert torch.equal(torch.cat(good), table[[i % 10 for i in range(64) if i != 17]])  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_calls_that_need_a_gradient_never_share_a_launch(runtime: Runtime) -> None:
    """Each caller's backward is its own; a second caller's does not fail."""
    weight = WEIGHT.clone().requires_grad_()
    inputs = [torch.randn(2, 16) for _ in range(6)]

    async def step(x: torch.Tensor) -> torch.Tensor:
        out = await lz.linear(x, weight)
        (gradient,) = torch.autograd.grad(out.sum(), weight)
        return gradient

    gradients = await asyncio.gather(*[step(x) for x in inputs])
    for x, gradient in zip(inputs, gradients, strict=True):
        torch.testing.assert_close(gradient, x.sum(0).expand(8, 16))
    assert set(sizes(runtime)) == {1}


@pytest.mark.asyncio
async def test_grad_mode_is_the_callers_own_across_an_await(runtime: Runtime) -> None:
    """A neighbour's no_grad around an await reaches nobody else, and is there again after its own."""
    weight = WEIGHT.clone().requires_grad_()

    async def without() -> tuple[bool, bool]:
        with torch.no_grad():
            out = await lz.linear(torch.randn(1, 16), weight)
            return out.requires_grad, torch.is_grad_enabled()

    async def with_gradient() -> tuple[bool, bool]:
        await lz.linear(torch.randn(1, 16), WEIGHT)
        out = await lz.linear(torch.randn(1, 16), weight)
        return out.requires_grad, torch.is_grad_enabled()

    results = await asyncio.gather(with_gradient(), without(), with_gradient(), without())
    assert results == [(True, True), (False, False), (True, True), (False, False)]
    assert torch.is_grad_enabled()


def test_inference_mode_leaking_from_a_neighbour_is_a_named_error() -> None:
    """Among tasks from before the loop's first call a mode that cannot be restored is reported."""

    async def leaks() -> None:
        with torch.inference_mode():
            await lz.linear(torch.randn(1, 16), WEIGHT)
            await asyncio.sleep(0)

    async def victim() -> None:
        await lz.linear(torch.randn(1, 16), WEIGHT)

    async def both() -> list[Any]:
        return list(await asyncio.gather(victim(), leaks(), return_exceptions=True))

    async def twice() -> tuple[list[Any], list[Any]]:
        return await both(), await both()

    with lz.start(lz.Settings(warm="off")):
        first, second = asyncio.run(twice())
    assert any(isinstance(r, lz.ModeChangedError) and "Settings(inference=True)" in str(r) for r in first)
    assert second == [None, None], "tasks made since have modes of their own"


@pytest.mark.asyncio
async def test_an_inference_runtime_needs_no_mode_around_awaits() -> None:
    """With Settings(inference=True) weights that require grad still batch, and results carry no graph."""
    weight = WEIGHT.clone().requires_grad_()
    async with lz.start(lz.Settings(inference=True)) as opened:
        outs = await asyncio.gather(*[lz.linear(torch.randn(1, 16), weight) for _ in range(32)])
        assert not any(out.requires_grad for out in outs)
        assert sizes(opened) == {32: 1}
        for _ in range(5):  # alone, and so inline
            assert not (await lz.linear(torch.randn(1, 16), weight)).requires_grad
        assert not lz.sync.linear(torch.randn(1, 16), weight).requires_grad
        assert torch.is_grad_enabled()


@pytest.mark.asyncio
async def test_a_function_mode_never_queues(runtime: Runtime) -> None:
    """A mode that watches its thread's operations sees the op, at once and on this thread."""
    seen: list[str] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    async def other() -> None:
        await lz.linear(torch.randn(1, 16), WEIGHT)

    with Watch():
        task = asyncio.ensure_future(other())
        await lz.linear(torch.randn(1, 16), WEIGHT)
    await task
    assert "linear" in seen


@pytest.mark.asyncio
async def test_a_cancelled_caller_strands_nobody(runtime: Runtime) -> None:
    """50 of 100 waiters cancelled: the others get their rows, and the counts add up."""

    async def caller(x: torch.Tensor) -> torch.Tensor:
        return await lz.linear(x, WEIGHT)

    inputs = [torch.randn(1, 16) for _ in range(100)]
    tasks = [asyncio.ensure_future(caller(x)) for x in inputs]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for position, (x, result) in enumerate(zip(inputs, results, strict=True)):
        if position % 2:
            assert isinstance(result, torch.Tensor)
            torch.testing.assert_close(result, torch.nn.functional.linear(x, WEIGHT))
        else:
            assert isinstance(result, asyncio.CancelledError)
    stats = runtime.device("cpu").loop_drivers.stats()
    assert stats.submitted == stats.ended


def test_a_call_that_cannot_start_in_time_expires() -> None:
    """`timeout=` is about starting; the error says how long the call waited."""
    with lz.start(lz.Settings(inline_limit_us=20.0, warm="off")) as runtime:
        assert "after 20000.0 ms in the queue" in run_virtually(_too_late(runtime))


async def _too_late(runtime: Runtime) -> str:
    """What the caller of a call behind a busy worker is told."""
    begun, hold = threading.Event(), threading.Event()

    def occupy() -> None:
        begun.set()
        assert hold.wait(30)

    runtime.device("cpu").worker.submit(occupy)
    assert begun.wait(30)
    big = torch.randn(4096, 512)
    weight = torch.randn(512, 512)

    async def first() -> None:
        await lz.linear(big, weight)

    async def late() -> None:
        await lz.rms_norm(torch.randn(1, 16), timeout=20.0)

    busy = asyncio.ensure_future(first())
    front = runtime.device("cpu").loop_drivers.current()
    for _ in range(3):
        await asyncio.sleep(0)
    assert front.batcher.inflight_batches
    with pytest.raises(lz.DeadlineExceededError) as told:
        await late()
    hold.set()
    await busy
    return str(told.value)


@pytest.mark.asyncio
async def test_awaited_equals_blocking_for_every_op(runtime: Runtime) -> None:
    """The two surfaces of each op answer alike."""
    x, ids = torch.randn(3, 16), torch.tensor([1, 2, 1])
    q = torch.randn(1, 2, 5, 8)
    calls: dict[str, tuple[Any, ...]] = {
        "linear": (x, WEIGHT),
        "rms_norm": (x,),
        "layer_norm": (x, torch.ones(16), torch.zeros(16)),
        "add_rms_norm": (x, x.clone()),
        "mlp": (x, torch.randn(32, 16), torch.randn(16, 16)),
        "embedding": (ids, torch.randn(4, 16)),
        "attention": (q, q, q),
        "cross_entropy": (x, ids),
    }
    for name, arguments in calls.items():
        awaited = await getattr(lz, name)(*arguments)
        blocking = getattr(layerzero.sync, name)(*arguments)
        torch.testing.assert_close(awaited, blocking)


@pytest.mark.asyncio
async def test_threads_and_coroutines_on_one_key_cause_one_decision(runtime: Runtime) -> None:
    """100 threads and 1,000 coroutines meet a new key: it is decided once, and everybody is served."""
    import threading

    x = torch.randn(5, 16)
    barrier = threading.Barrier(100)
    out: list[torch.Tensor] = []

    def blocking() -> None:
        barrier.wait()
        out.append(layerzero.sync.layer_norm(x))

    threads = [threading.Thread(target=blocking) for _ in range(100)]
    for thread in threads:
        thread.start()
    awaited = await asyncio.gather(*[lz.layer_norm(x) for _ in range(1000)])
    for thread in threads:
        await asyncio.to_thread(thread.join)
    table = runtime.device("cpu").snapshot.tables["layer_norm"]
    single = {plan.request.dims["N"] for hot in table.by_signature for plan in hot.values()}
    assert len(awaited) == 1000 and len(out) == 100
    assert table.computed == len({key for key in table.by_key}) <= len(single)
    want = torch.nn.functional.layer_norm(x, (16,))
    assert all(torch.allclose(t, want, atol=1e-6) for t in [*awaited, *out])


@pytest.mark.asyncio
async def test_spawned_coroutines_batch_like_tasks(runtime: Runtime) -> None:
    """`rt.spawn` steps 64 request coroutines; their ops share launches and their results come back."""
    inputs = [torch.randn(1, 16) for _ in range(64)]

    async def request(x: torch.Tensor) -> torch.Tensor:
        x = await lz.rms_norm(x)
        return await lz.linear(x, WEIGHT)

    outs = await asyncio.gather(*[runtime.spawn(request(x)) for x in inputs])
    for x, out in zip(inputs, outs, strict=True):
        normed = torch.nn.functional.rms_norm(x, (16,), eps=1e-6)
        torch.testing.assert_close(out, torch.nn.functional.linear(normed, WEIGHT))
    assert sizes(runtime) == {64: 2}


class Marked(torch.Tensor):
    """Somebody's own kind of tensor."""


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as quantized and distributed ones are."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        return made

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares the one that is switched off
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*(a.held if isinstance(a, Wrapped) else a for a in args), **(kwargs or {}))


@pytest.mark.asyncio
async def test_somebody_elses_kind_of_tensor_reaches_no_neighbour(runtime: Runtime) -> None:
    """Each caller gets the kind it brought: a subclass joins no batch."""
    row = torch.randn(1, 16)
    for _ in range(2):
        found = await asyncio.gather(
            lz.linear(row, WEIGHT), lz.linear(row.as_subclass(Marked), WEIGHT), lz.linear(row, WEIGHT)
        )
        assert [type(out) for out in found] == [torch.Tensor, Marked, torch.Tensor]


@pytest.mark.asyncio
async def test_weights_that_look_alike_are_not_the_same_weight(runtime: Runtime) -> None:
    """Two weights without an address, and one seen through a minus sign, are each caller's own."""
    row = torch.randn(1, 16)
    plain = [torch.randn(8, 16) for _ in range(2)]
    turned = torch.randn(8, 16, dtype=torch.complex64)
    for weights, values in (
        ([Wrapped(weight) for weight in plain], plain),
        ([turned.imag, turned.conj().imag], [turned.imag, -turned.imag]),
    ):
        for _ in range(2):
            found = await asyncio.gather(*(lz.linear(row, weight) for weight in weights))
            for out, value in zip(found, values, strict=True):
                torch.testing.assert_close(out, row @ value.T)


@pytest.mark.asyncio
async def test_a_weight_replaced_while_its_call_waits_draws_no_stranger_in(runtime: Runtime) -> None:
    """Who brings the memory that the weight had when it was queued gets that memory's product."""
    old, new = torch.randn(8, 8), torch.randn(8, 8)
    weight = old.detach()
    x = torch.randn(2, 8)
    with torch.no_grad():
        for _ in range(2):  # the second time as calls that are known
            weight.data = old
            mine = asyncio.ensure_future(_one(lz.linear(x, weight)))
            beside = asyncio.ensure_future(_one(lz.linear(x, old)))
            await asyncio.sleep(0)
            weight.data = new
            stranger = asyncio.ensure_future(_one(lz.linear(x, old)))
            torch.testing.assert_close(await stranger, x @ old.T)
            torch.testing.assert_close(await beside, x @ old.T)
            torch.testing.assert_close(await mine, x @ new.T)


async def _one(call: Any) -> torch.Tensor:
    result: torch.Tensor = await call
    return result
