"""Code that the tests send to devices; imported there by name, so that its state is the device's own."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import torch

import layerzero as lz
from layerzero.actors.rpc.server import current_server
from layerzero.actors.rpc.tensors import RemoteTensor
from layerzero.ops import table as ops_table
from layerzero.runtime import current
from layerzero.sharing.work import SHARED
from layerzero.spec.capability import Capability
from layerzero.spec.kernel import Efficiency, Kernel
from tests.kernels import EVERYTHING

COUNTS: Counter[Any] = Counter()
EVENTS: list[str] = []


class OddError(Exception):
    """An error of the user's own, with an argument that its message does not hold."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


async def add(a: int, b: int = 1) -> int:
    await asyncio.sleep(0)
    return a + b


def plain(a: int) -> int:
    return a * 2


async def choose_norm(rows: int) -> dict[str, Any]:
    """Run a norm; what was chosen for it, why, and how many choices of others were taken for it."""
    lz.sync.layer_norm(torch.ones(rows, 24))
    selection = lz.last_selection()
    assert selection is not None
    counts = current().counters.snapshot().items()
    shared = sum(n for s, n in counts if s.name == "choices_shared" and ("op", "layer_norm") in s.labels)
    joined = SHARED._leases is not None
    return {"kernel": selection.kernel, "why": selection.why, "shared": shared, "joined": joined}


async def pid() -> int:
    return os.getpid()


async def bump(key: Any, pause: float = 0.0) -> int:
    COUNTS[key] += 1
    await asyncio.sleep(pause)
    return COUNTS[key]


async def counts() -> dict[Any, int]:
    return dict(COUNTS)


async def mark(path: str, key: int, seconds: float = 0.01) -> int:
    """Write the key down in a file, one line an execution, and take a moment."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, b"%d\n" % key)
    os.close(file)
    await asyncio.sleep(seconds)
    return key


async def events() -> list[str]:
    return list(EVENTS)


async def forget() -> None:
    COUNTS.clear()
    EVENTS.clear()


async def fail(kind: str) -> None:
    if kind == "value":
        raise ValueError("the argument is wrong")
    if kind == "odd":
        raise OddError("odd", code=7)
    if kind == "kernel":
        raise lz.KernelExecutionError("no kernel left", kernel="a.b")
    await lz.rms_norm(torch.ones(2, 8), torch.ones(9))


async def quit(kind: str) -> None:
    raise {"exit": SystemExit(3), "interrupt": KeyboardInterrupt()}[kind]


def quit_on_a_thread(kind: str) -> None:
    raise {"exit": SystemExit(3), "iteration": StopIteration(5)}[kind]


async def linger(name: str, seconds: float = 30.0) -> str:
    EVENTS.append(f"{name} began")
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        EVENTS.append(f"{name} cancelled")
        raise
    EVENTS.append(f"{name} ended")
    return name


async def norm(rows: int) -> tuple[bool, str]:
    """An op on this device: whether it equals the reference, and the kernel that ran."""
    x = torch.arange(float(rows * 8)).view(rows, 8) + 1.0
    got = await lz.rms_norm(x)
    selection = lz.last_selection()
    assert selection is not None
    want = ops_table.get("rms_norm").reference(*ops_table.get("rms_norm").build(x)[1])
    return bool(torch.allclose(got, want, atol=1e-5)), selection.kernel


_WEIGHT = torch.eye(16)


_ARRIVED: list[asyncio.Event] = []


async def row(value: float, together: int) -> float:
    """Two linear layers for one row, as a request among many; each waits until so many are here."""
    group = asyncio.Event() if len(_ARRIVED) % together == 0 else _ARRIVED[-1]
    _ARRIVED.append(group)
    if len(_ARRIVED) % together == 0:
        group.set()
    await group.wait()
    x = torch.full((1, 16), value)
    for _ in range(2):
        x = await lz.linear(x, _WEIGHT)
    return float((await lz.to_host(x))[0, 0])


async def batches() -> tuple[int, int]:
    """Calls and launches of the batchers of this device."""
    stats = current().device("cpu").loop_drivers.stats()
    return stats.submitted, stats.batches


async def total(tensor: torch.Tensor) -> float:
    return float(tensor.float().sum())


async def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


async def kept(handle_key: str) -> bool:
    """Whether this device still keeps the tensor of a handle."""
    host = current_server()
    try:
        host.tensor_store.get(RemoteTensor(handle_key, host.name, host.incarnation, (), ""))
    except LookupError:
        return False
    return True


async def count(n: int, so_far: list[int] | None = None) -> AsyncIterator[int]:
    try:
        for i in range(len(so_far or ()), n):
            yield i
            await asyncio.sleep(0)
    finally:
        EVENTS.append(f"count({n}) closed")


async def stumble(n: int) -> AsyncIterator[int]:
    for i in range(n):
        yield i
    raise ValueError("stumbled")


async def named(take: int, fn: int) -> AsyncIterator[int]:
    yield take + fn


async def odd_item() -> AsyncIterator[Any]:
    yield object()


async def tokens(
    seed: int, n: int, pause: float = 0.0, so_far: list[int] | None = None
) -> AsyncIterator[int]:
    """A seeded generation: each token depends on the seed and on all tokens before it."""
    state = list(so_far or ())
    while len(state) < n:
        x = torch.full((1, 16), float(seed % 7 + sum(state) % 11 + 1))
        y = await lz.rms_norm(x)
        state.append(int((seed * 31 + sum(state) * 7 + len(state) + round(float(y.sum()))) % 997))
        yield state[-1]
        await asyncio.sleep(pause)


async def handlers() -> None:
    """Register control handlers: an echo, one that waits, one that fails."""
    host = current_server()

    async def later(body: Any, _: Any) -> Any:
        await asyncio.sleep(0.01)
        return ["later", body]

    def bad(body: Any, _: Any) -> Any:
        raise ValueError(f"bad {body}")

    host.on("test.echo", lambda body, _: body)
    host.on("test.later", later)
    host.on("test.bad", bad)
    EVENTS.append("handlers")


# -- kernels that fail in their own ways --------------------------------------------------------------


def _die(*args: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang(*args: Any) -> Any:
    time.sleep(600)


def _hang_holding_the_interpreter(*args: Any) -> Any:
    ctypes.PyDLL(None).sleep(600)


def _fault(*args: Any) -> Any:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def _good(*args: Any) -> Any:
    return ops_table.get("rms_norm").reference(*args)


BODIES = {"die": _die, "hang": _hang, "hold": _hang_holding_the_interpreter, "fault": _fault, "good": _good}


async def plant(body: str) -> None:
    """Register a kernel that is chosen before all others and behaves as `body` says."""
    run = BODIES[body]
    current().add_kernel(
        Kernel(
            id=f"planted.rms_norm.{body}",
            op="rms_norm",
            backend="planted",
            capability=Capability(source="a test", features=EVERYTHING, mixed_dtypes=True),
            load=lambda: run,
            efficiency=Efficiency(flops=1.0, bandwidth=1.0, launch_us=0.001, source="a test"),
            tie_break_order=0,
        )
    )


async def quarantined() -> list[str]:
    return sorted(current().device("cpu").health.blocked_kernels())


async def decided() -> list[str]:
    """What this device has decided: the op, the size and the kernel of each plan."""
    tables = current().device("cpu").snapshot.tables.values()
    return sorted(
        f"{p.selection.op} {sorted(p.selection.request.dims.items())} {p.kernel}"
        for table in tables
        for p in table.by_key.values()
    )


async def exit_now() -> None:
    os._exit(3)


class Heavy:
    """Many bytes, which count how often they are packed."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __reduce__(self) -> tuple[Any, ...]:
        COUNTS["packed"] += 1
        return _unpacked, (bytes(self.size),)


def _unpacked(data: bytes) -> Heavy:
    COUNTS["unpacked"] += 1
    return Heavy(len(data))


async def heavier(heavy: Heavy, more: int) -> Heavy:
    return Heavy(heavy.size + more)


async def stand_still(seconds: float) -> None:
    """Keep the loop of the device to itself, so that nothing else is served."""
    time.sleep(seconds)  # noqa: ASYNC251


async def poison(path: str, key: int) -> None:
    """Write the key down, and end the process."""
    await mark(path, key)
    os._exit(3)


async def poisoned(path: str, so_far: list[int]) -> AsyncIterator[int]:
    """Items until the third, right behind which the process ends."""
    await mark(path, len(so_far), 0.0)
    for i in range(len(so_far), 3):
        yield i
    os._exit(3)


async def faulty_once(path: str) -> int:
    """A fault of the device at the first time, then how often it ran."""
    await mark(path, 0, 0.0)
    ran = os.path.getsize(path) // len("0\n")  # noqa: ASYNC240  a look
    if ran == 1:
        await faulty()
    return ran


async def lose_another() -> None:
    """What code raises that has lost a device of its own."""
    raise lz.DeviceLostError("a device that this code uses", retryable=True)


async def faulty() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


async def a_lock() -> Any:
    return threading.Lock()
