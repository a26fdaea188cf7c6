"""One device is as good as another: the same assertions over the device of this process and one in an actor.

`test_chaos.py` runs this file once more while Ray loses messages.
"""

from __future__ import annotations

import asyncio
import gc
import os
import warnings
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

import layerzero as lz
from layerzero.actors.remote.pool import DevicePool
from layerzero.actors.rpc.client import DeviceClient, DeviceState
from layerzero.actors.rpc.local_client import LocalClient
from layerzero.actors.rpc.tensors import RemoteTensor
from tests.distributed import hosted
from tests.waiting import LIMIT_S, until

PORTS = os.environ.get("LZ_TEST_PORTS", "local,ray").split(",")

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.filterwarnings("ignore::ResourceWarning")]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=PORTS)
async def device_pool(request: pytest.FixtureRequest) -> AsyncIterator[DevicePool]:
    """A device pool of one device."""
    cluster = None
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
        cluster = "auto"
    one = 1 if cluster else None
    settings = lz.Settings(cluster=cluster, cluster_devices=one, device="cpu", placement_timeout_s=LIMIT_S)
    async with lz.start(settings) as runtime:
        await runtime.device_pool.prepare(hosted.handlers)
        yield runtime.device_pool


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def fresh(device_pool: DevicePool) -> None:
    """A device that serves, and remembers nothing of the test before."""
    if only(device_pool).state is not DeviceState.RUNNING:
        await only(device_pool).restart()
    await device_pool.run(hosted.forget)


def only(device_pool: DevicePool) -> DeviceClient:
    """The one device of a device pool."""
    (device,) = device_pool.devices.values()
    return device


async def began(device_pool: DevicePool, name: str) -> None:
    """Wait until a call that lingers has begun."""

    async def seen() -> bool:
        return f"{name} began" in await device_pool.run(hosted.events)

    await until(seen)


async def test_results_come_back(device_pool: DevicePool) -> None:
    """A coroutine function, a plain function, positional and named arguments."""
    assert await device_pool.run(hosted.add, 2) == 3
    assert await device_pool.run(hosted.add, 2, b=5) == 7
    assert await device_pool.run(hosted.plain, 4) == 8
    assert await device_pool.run(lambda: 11) == 11


async def test_errors_arrive_as_they_were_raised(device_pool: DevicePool) -> None:
    """The class, the message and the attributes; ours and the user's own."""
    with pytest.raises(ValueError, match="the argument is wrong") as value:
        await device_pool.run(hosted.fail, "value")
    assert (type(value.value), str(value.value)) == (ValueError, "the argument is wrong")
    with pytest.raises(lz.KernelExecutionError) as kernel:
        await device_pool.run(hosted.fail, "kernel")
    assert (kernel.value.kernel, kernel.value.context["kernel"]) == ("a.b", "a.b")
    with pytest.raises(ValueError, match="weight"):
        await device_pool.run(hosted.fail, "op")


async def test_code_that_would_end_its_process_fails_alone(device_pool: DevicePool) -> None:
    """`sys.exit` would end the device's event loop: the caller gets an error, the device serves."""
    for fn, kind, said in (
        (hosted.quit, "exit", r"hosted code raised SystemExit\(3\)"),
        (hosted.quit, "interrupt", r"hosted code raised KeyboardInterrupt\(\)"),
        (hosted.quit_on_a_thread, "exit", r"hosted code raised SystemExit\(3\)"),
        (hosted.quit_on_a_thread, "iteration", "quit_on_a_thread raised StopIteration"),
    ):
        with pytest.raises(RuntimeError, match=said):
            await asyncio.wait_for(device_pool.run(fn, kind), 60.0)
    assert await device_pool.run(hosted.add, 1) == 2


async def test_ops_are_local_where_the_code_runs(device_pool: DevicePool) -> None:
    """`layerzero.*` in hosted code runs on the device, and gives what the reference gives."""
    right, kernel = await device_pool.run(hosted.norm, 5)
    assert right
    assert kernel.startswith(("torch.", "reference.", "zentorch.", "native."))


async def test_concurrent_calls_meet_in_one_lane(device_pool: DevicePool) -> None:
    """64 requests sent one by one become batches where they run, however slowly they arrive."""
    before = await device_pool.run(hosted.batches)
    values = await asyncio.gather(*(device_pool.run(hosted.row, float(i), 8) for i in range(64)))
    after = await device_pool.run(hosted.batches)
    assert values == [float(i) for i in range(64)]
    calls, launches = after[0] - before[0], after[1] - before[1]
    assert launches < calls or calls == 0


async def test_each_request_runs_once(device_pool: DevicePool) -> None:
    """Executions are as many as distinct requests, whatever the way loses."""
    await asyncio.gather(*(device_pool.run(hosted.bump, i) for i in range(100)))
    assert await device_pool.run(hosted.counts) == dict.fromkeys(range(100), 1)


async def test_a_cancelled_caller_cancels_its_call_alone(device_pool: DevicePool) -> None:
    """The hosted coroutine sees the cancellation; its neighbour ends undisturbed."""
    mine = asyncio.ensure_future(device_pool.run(hosted.linger, "mine"))
    other = asyncio.ensure_future(device_pool.run(hosted.linger, "other", 0.3))

    async def began() -> bool:
        return {"mine began", "other began"} <= set(await device_pool.run(hosted.events))

    await until(began)
    mine.cancel()
    with pytest.raises(asyncio.CancelledError):
        await mine
    assert await other == "other"

    async def cancelled() -> bool:
        return "mine cancelled" in await device_pool.run(hosted.events)

    await until(cancelled)
    assert "other cancelled" not in await device_pool.run(hosted.events)


async def test_a_deadline_ends_the_call_on_the_device(device_pool: DevicePool) -> None:
    """The caller gets DeadlineExceededError and the hosted coroutine is cancelled."""

    async def late() -> bool:
        with pytest.raises(lz.DeadlineExceededError):
            await device_pool.run(hosted.linger, "late", timeout_s=0.3)
        # Where every message of the call was lost in that time it has not begun, and never will.
        return "late began" in await device_pool.run(hosted.events)

    async def cancelled() -> bool:
        return "late cancelled" in await device_pool.run(hosted.events)

    await until(late)
    await until(cancelled)


async def test_streams_keep_order_and_end(device_pool: DevicePool) -> None:
    """Every item once, in order; an error after the items; a consumer that leaves closes the generator."""
    assert [item async for item in device_pool.stream(hosted.count, 50)] == list(range(50))
    got = []
    with pytest.raises(ValueError, match="stumbled"):
        async for item in device_pool.stream(hosted.stumble, 3):
            got.append(item)
    assert got == [0, 1, 2]
    stream = device_pool.stream(hosted.count, 100_000)
    async for item in stream:
        if item == 3:
            break
    await stream.aclose()  # type: ignore[attr-defined]

    async def closed() -> bool:
        return "count(100000) closed" in await device_pool.run(hosted.events)

    await until(closed)


async def test_forwarded_items_keep_order_and_end(device_pool: DevicePool) -> None:
    """As a stream's; an error of the receiver, and a caller that is cancelled, close the generator."""
    got: list[int] = []
    await device_pool.forward(got.append, hosted.count, 50)
    assert got == list(range(50))
    got.clear()
    with pytest.raises(ValueError, match="stumbled"):
        await device_pool.forward(got.append, hosted.stumble, 3)
    assert got == [0, 1, 2]

    def refuse(item: int) -> None:
        got.append(item)
        raise LookupError(f"nobody wants {item}")

    got.clear()
    with pytest.raises(LookupError, match="nobody wants 0"):
        await device_pool.forward(refuse, hosted.count, 100_001)
    assert got == [0]
    task = asyncio.ensure_future(device_pool.forward(got.append, hosted.count, 100_002))

    async def begun() -> bool:
        return len(got) > 1

    await until(begun)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    async def closed() -> bool:
        events = await device_pool.run(hosted.events)
        return "count(100001) closed" in events and "count(100002) closed" in events

    await until(closed)


async def test_a_keyword_may_have_the_name_of_a_parameter(device_pool: DevicePool) -> None:
    """`take` and `fn` are by position alone, so that the function may have its own."""
    assert [item async for item in device_pool.stream(hosted.named, take=3, fn=4)] == [7]
    got: list[int] = []
    await device_pool.forward(got.append, hosted.named, take=3, fn=4)
    assert got == [7]


async def test_a_function_that_is_no_generator_is_refused(device_pool: DevicePool) -> None:
    """`stream` names what it needs."""
    with pytest.raises(TypeError, match="async generator"):
        async for _ in device_pool.stream(hosted.plain, 1):
            pass
    with pytest.raises(TypeError, match="async generator"):
        await device_pool.forward(print, hosted.plain, 1)


async def test_seeded_generation_is_the_same_everywhere(device_pool: DevicePool) -> None:
    """The tokens depend on the seed and the tokens before, not on the device or on its neighbours."""

    async def collected(seed: int) -> list[int]:
        return [t async for t in device_pool.stream(hosted.tokens, seed, 12, resume=True)]

    many = await asyncio.gather(*(collected(seed) for seed in range(8)))
    for seed, tokens in enumerate(many):
        assert tokens == [t async for t in hosted.tokens(seed, 12)]


async def test_control_messages(device_pool: DevicePool) -> None:
    """Answers, answers that take time, errors, and a name that nobody answers."""
    device = device_pool.device()
    body = {"a": [1, 2.5, "x", b"y", None, True]}
    assert await device.control("test.echo", body) == body
    assert await device.control("test.later", 3) == ["later", 3]
    with pytest.raises(ValueError, match="bad 9"):
        await device.control("test.bad", 9)
    with pytest.raises(LookupError, match="no handler is registered for 'nobody'"):
        await device.control("nobody")
    assert await asyncio.gather(*(device.control("ping", i) for i in range(100))) == list(range(100))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
async def test_shipped_tensors_are_equal(device_pool: DevicePool, dtype: torch.dtype) -> None:
    """Shape, dtype and bits survive the way there and back; the empty tensor too."""
    for shape in ((3, 5), (0, 4), ()):
        tensor = (torch.randn(shape) * 9).to(dtype)
        handle = await device_pool.ship(tensor, to=None)
        assert (handle.shape, handle.dtype) == (tuple(shape), str(dtype).removeprefix("torch."))
        back = await device_pool.fetch(handle)
        assert back.dtype == dtype
        assert torch.equal(back, tensor)


async def test_a_handle_becomes_the_tensor_in_hosted_code(device_pool: DevicePool) -> None:
    """Only where it lives; a view arrives without its neighbours' rows."""
    big = torch.randn(64, 8)
    handle = await device_pool.ship(big[3], to=None)
    assert await device_pool.run(hosted.total, handle, on=handle.device) == pytest.approx(float(big[3].sum()))
    assert await device_pool.run(hosted.storage, handle) == big[3].numel() * 4
    foreign = RemoteTensor("key", "elsewhere", "gen", (2,), "float32")
    with pytest.raises(ValueError, match="ship"):
        await device_pool.run(hosted.total, foreign, on=handle.device)


async def test_ops_refuse_a_tensor_of_another_process(device_pool: DevicePool) -> None:
    """And the refusal says what to do."""
    handle: Any = await device_pool.ship(torch.ones(4, 8), to=None)
    calls = (
        lambda: lz.sync.rms_norm(handle), lambda: torch.add(handle, 1), lambda: handle.sum(),
        lambda: handle + 1, lambda: torch.ones(4, 4) @ handle, lambda: handle[0],
    )  # fmt: skip
    for call in calls:
        with pytest.raises(TypeError, match=r"pool\.run\(fn, handle, on="):
            call()
    awaits: tuple[Callable[[], Any], ...] = (
        lambda: lz.rms_norm(torch.ones(4, 8), handle), lambda: lz.to_host(handle),
    )  # fmt: skip
    for awaited in awaits:
        with pytest.raises(TypeError, match=r"pool\.fetch\(handle\)"):
            await awaited()


async def test_a_collected_handle_frees_its_tensor(device_pool: DevicePool) -> None:
    """The device keeps nothing for a handle that nobody holds."""

    handle = await device_pool.ship(torch.ones(4), to=None)
    key = handle.key
    assert await device_pool.run(hosted.kept, key)
    del handle

    async def freed() -> bool:
        gc.collect()
        return not await device_pool.run(hosted.kept, key)

    await until(freed)


async def test_a_rolling_restart_under_load_fails_nobody(device_pool: DevicePool) -> None:
    """Calls, streams and control messages that come meanwhile wait for the next life; each call runs once.

    What runs ends first. Preparations run again; tensors of the old life are lost with an error.
    """
    device = only(device_pool)
    before = device.facts.incarnation
    handle = await device_pool.ship(torch.ones(4), to=None)
    through = asyncio.ensure_future(device_pool.run(hosted.linger, "through", 0.3))
    await began(device_pool, "through")
    stop = asyncio.Event()
    answered: list[int] = []

    async def caller(base: int) -> None:
        key = base
        while not stop.is_set():
            assert await device_pool.run(hosted.add, key) == key + 1
            answered.append(key)
            assert await device_pool.device().control("ping", key) == key
            key += 8
            await asyncio.sleep(0.005)

    async def streamer() -> None:
        while not stop.is_set():
            assert [item async for item in device_pool.stream(hosted.count, 3, resume=True)] == [0, 1, 2]

    work = [asyncio.ensure_future(caller(base)) for base in range(8)]
    work.append(asyncio.ensure_future(streamer()))

    async def more() -> bool:
        return len(answered) > told

    told = 0
    await until(more)
    await device_pool.rolling_restart()
    told = len(answered)
    await until(more)
    stop.set()
    await asyncio.gather(*work)
    assert await through == "through"
    assert device.facts.incarnation != before
    assert (await device.health()).restarts >= 1
    assert await device.control("test.echo", 1) == 1
    with pytest.raises(lz.DeviceLostError, match="earlier incarnation"):
        await device_pool.fetch(handle)
    assert 0 < told < len(answered)
    assert len(set(answered)) == len(answered)


async def test_a_drain_under_load_answers_every_call_or_refuses_it(
    device_pool: DevicePool, tmp_path: Path
) -> None:
    """What was accepted ends with its result, what was not had no effect: executions equal answers."""
    last = asyncio.ensure_future(device_pool.run(hosted.linger, "last", 1.0))
    await began(device_pool, "last")
    refused = 0
    answered: list[int] = []
    path = str(tmp_path / "executed")

    async def caller(base: int) -> None:
        nonlocal refused
        for key in range(base, base + 1000):
            try:
                answered.append(await device_pool.run(hosted.mark, path, key, on=only(device_pool)))
            except lz.DeviceLostError as error:
                assert error.retryable
                refused += 1
                return

    callers = [asyncio.ensure_future(caller(base)) for base in range(0, 16_000, 1000)]

    async def under_way() -> bool:
        return len(answered) >= 16

    await until(under_way)
    assert await device_pool.drain(20.0) is True
    await asyncio.gather(*callers)
    assert await last == "last"
    assert (await device_pool.health())[0].state is DeviceState.DRAINING
    assert refused == 16
    assert sorted(map(int, Path(path).read_text().split())) == sorted(answered)  # noqa: ASYNC240


def keep_in_a_ring(ray: Any) -> None:
    """Leave handles of Ray's to the collector."""
    (name,) = ray.util.list_named_actors()
    ring: list[Any] = [ray.get_actor(name), ray.put(1)]
    ring.append(ring)


async def test_a_forked_child_is_told_so_or_begins_anew(
    device_pool: DevicePool, request: pytest.FixtureRequest
) -> None:
    """After initialisation, with threads: no hang; ops work there; the parent goes on as if nothing was.

    Collecting the parent's handles there calls nobody.
    """
    local = isinstance(only(device_pool), LocalClient)
    assert await device_pool.run(hosted.add, 1) == 2
    if not local:
        keep_in_a_ring(request.getfixturevalue("ray_cluster"))
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fork with threads, which this test is about
        child = os.fork()
    if child == 0:
        verdict = b"wrong"
        try:
            fine = bool(torch.isfinite(lz.sync.rms_norm(torch.ones(2, 8))).all())
            try:
                verdict = b"anew" if asyncio.run(device_pool.run(hosted.add, 1)) == 2 and fine else b"wrong"
            except lz.RuntimeClosedError as error:
                gc.collect()
                fine &= not request.getfixturevalue("ray_cluster").is_initialized()
                verdict = b"told" if fine and "forked" in str(error) else b"wrong"
        finally:
            os.write(writer, verdict)
            os._exit(0)
    os.close(writer)
    said = await asyncio.to_thread(os.read, reader, 16)
    os.close(reader)
    os.waitpid(child, 0)  # noqa: ASYNC222  it has written its last
    assert said == (b"anew" if local else b"told")
    assert await device_pool.run(hosted.add, 1) == 2


async def test_health_and_facts_say_what_the_device_is(device_pool: DevicePool) -> None:
    """The same fields, wherever it lives."""
    (facts,) = device_pool.facts
    (health,) = await device_pool.health()
    assert facts.pid == health.pid == await device_pool.run(hosted.pid)
    assert facts.incarnation == health.incarnation
    assert facts.versions["torch"] == torch.__version__
    assert facts.hardware.platform == "cpu"
    assert health.state is DeviceState.RUNNING
    assert device_pool.nodes == {facts.node: [facts.name]}


async def test_what_cannot_be_run_is_refused_by_name(device_pool: DevicePool) -> None:
    """Before anything travels."""
    with pytest.raises(TypeError, match="fn needs a function, got int"):
        await device_pool.run(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="timeout_s"):
        await device_pool.run(hosted.add, 1, timeout_s="soon")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout_s"):
        await device_pool.run(hosted.add, 1, timeout_s=-1.0)


async def test_what_is_no_tensor_is_not_shipped(device_pool: DevicePool) -> None:
    """The message names the argument."""
    with pytest.raises(TypeError, match=r"tensor needs a torch\.Tensor or a handle of one, got list"):
        await device_pool.ship([1, 2], to=only(device_pool))  # type: ignore[arg-type]


async def test_an_unknown_device_is_named(device_pool: DevicePool) -> None:
    """The message lists the devices there are."""
    (name,) = device_pool.devices
    with pytest.raises(ValueError, match=f"on needs one of '{name}', got 'nowhere'"):
        await device_pool.run(hosted.add, 1, on="nowhere")


# Last, for no test after it needs another life of the device.
async def test_a_drain_that_takes_too_long_cuts_off(device_pool: DevicePool) -> None:
    """False, and the caller learns that its call had started."""
    running = asyncio.ensure_future(device_pool.run(hosted.linger, "endless"))
    await began(device_pool, "endless")
    assert await device_pool.drain(0.1) is False
    with pytest.raises(lz.DeviceLostError) as lost:
        await running
    assert not lost.value.retryable
