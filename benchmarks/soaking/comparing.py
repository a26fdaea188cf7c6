"""`lz consistency` beside a soak: it never blames devices that agree, and always finds one that differs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import layerzero as lz
from layerzero.actors.remote.pool import DevicePool
from layerzero.actors.rpc.client import DeviceState
from layerzero.calls.blocking import context_runtime
from layerzero.cli.deployment import Deployment, DeploymentCall, check_pool, examine

EVERY_S, COMMAND_EVERY_S = 8.0, 120.0
LIMIT_S = 240.0
CALLS = (
    DeploymentCall("rms_norm", ("x=4x64:f32",)),
    DeploymentCall("linear", ("x=8x64:f32", "weight=32x64:f32")),
    DeploymentCall("attention", ("q=1x4x1x32:f32", "k=1x4x16x32:f32", "v=1x4x16x32:f32")),
)
MANIFEST = Deployment(CALLS)
TEXT = "version: 1\ncalls:\n" + "".join(
    f"  - {{op: {c.op}, arguments: {json.dumps(c.arguments)}}}\n" for c in CALLS
)


class Comparing:
    """One comparison after the other of a pool whose devices die meanwhile."""

    def __init__(self, pool: DevicePool, address: str) -> None:
        self.pool, self.address = pool, address
        self.looked: Counter[str] = Counter()
        self.alarms: list[str] = []
        self.running = True

    async def run(self) -> None:
        """Compare until `running` is taken back; now and then by the command, over devices of its own."""
        loop = asyncio.get_running_loop()
        commanded = loop.time() - COMMAND_EVERY_S / 2
        while self.running:
            await asyncio.sleep(EVERY_S)
            self._count(await look(self.pool))
            if self.address and loop.time() - commanded > COMMAND_EVERY_S and self.running:
                self._count(await command(self.address), "command: ")
                commanded = loop.time()

    def _count(self, found: str, how: str = "") -> None:
        self.looked[how + found.partition(":")[0]] += 1
        if found.startswith(("alarm", "unnamed")):
            self.alarms.append(how + found)

    def checks(self) -> dict[str, bool]:
        """What has to hold."""
        return {
            "consistency: no false alarm": not self.alarms,
            "consistency: devices were seen to agree": self.looked["agree"] > 0,
        }

    def record(self) -> dict[str, Any]:
        """What is written down."""
        return {"comparisons": dict(self.looked), "false alarms": self.alarms}


async def look(pool: DevicePool) -> str:
    """`agree`, `lost` where a device died meanwhile, or `alarm:` and what disagrees."""
    try:
        async with asyncio.timeout(LIMIT_S):
            report = await check_pool(MANIFEST, pool)
    except lz.DeviceLostError:
        return "lost"
    except TimeoutError:
        return f"unnamed: no end within {LIMIT_S:g} s"
    except Exception as error:
        return f"unnamed: {type(error).__name__}: {error}"[:500]
    if report.ok:
        return "agree"
    return "alarm: " + "; ".join(f"{f.check} {f.about} {f.values}" for f in report.findings)[:2000]


async def command(address: str) -> str:
    """The same by `lz consistency`, which opens two devices of the cluster for that."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(TEXT)
        file.flush()
        words = ["-m", "layerzero", "consistency", "--json", "--cluster", address, "--devices", "2"]
        child = await asyncio.create_subprocess_exec(
            sys.executable, *words, "--deployment", file.name,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            out, err = await asyncio.wait_for(child.communicate(), LIMIT_S)
        except TimeoutError:
            child.kill()
            await child.wait()
            return f"unnamed: no end within {LIMIT_S:g} s"
    if child.returncode == 0:
        return "agree"
    said = (out + err).decode()[-1500:]
    return f"lost: {said}" if "DeviceLostError:" in said and "Traceback" not in said else f"alarm: {said}"


# -- planted divergences: what runs on the one device ---------------------------------------------------


async def _chosen() -> str:
    """The kernel that serves the first call of the manifest on this device once it is ready."""
    return (await examine(CALLS[:1])).answers[0].kernel


async def _altered(alter: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let a kernel that keeps its name give other numbers."""
    device = context_runtime().device("cpu")
    kernel = device.registry.get(await _chosen())
    assert kernel is not None
    own = kernel.load()
    device.registry.replace(dataclasses.replace(kernel, load=lambda: lambda *args: alter(own(*args))))
    device.refresh()


async def another_bit() -> None:
    """The last bit of every number is another one."""
    await _altered(lambda out: torch.nextafter(out, torch.full_like(out, torch.inf)))


async def another_number() -> None:
    """Every number is wrong."""
    await _altered(lambda out: out * 1.25)


async def another_kernel() -> None:
    """A right kernel that the others do not have is taken."""
    kernel = context_runtime().device("cpu").registry.get("reference.rms_norm")
    assert kernel is not None
    best = lz.Efficiency(1.0, 1.0, 0.001, "said to be free, so that it is taken")
    context_runtime().add_kernel(
        dataclasses.replace(
            kernel, id="planted.rms_norm", backend="planted", efficiency=best, tie_break_order=0
        )
    )


async def another_policy() -> None:
    """The device is locked to what the others are not."""
    lz.lock("rms_norm", "reference")


async def a_quarantine() -> None:
    """One kernel serves on all devices but this one."""
    context_runtime().device("cpu").health.quarantine(await _chosen(), "planted")
    context_runtime().device("cpu").refresh()


PLANTED = (another_bit, another_number, another_kernel, another_policy, a_quarantine)
TRIES = 6


class Planting:
    """Each divergence on one device while another is killed; then the device begins anew and agrees."""

    def __init__(self, pool: DevicePool, on: str, killed: str) -> None:
        self.pool, self.on, self.killed = pool, on, killed
        self.found: dict[str, list[str]] = {}
        self.kills = 0

    async def run(self, rounds: int) -> None:
        """Plant everything so often."""
        for _ in range(rounds):
            for plant in PLANTED:
                await self.pool.run(plant, on=self.on)
                self._kill()
                seen = await self._seen()
                await self.pool.devices[self.on].restart(drain_s=1.0)
                after = await self._seen()
                self.found.setdefault(plant.__name__, []).append(
                    f"{'found' if seen.startswith('alarm') else 'MISSED'}: {seen[:160]}, then {after[:200]}"
                )

    def _kill(self) -> None:
        device = self.pool.devices[self.killed]
        if device.state is DeviceState.RUNNING:
            os.kill(device.facts.pid, signal.SIGKILL)
            self.kills += 1

    async def _seen(self) -> str:
        """What a comparison says that lost no device."""
        for _ in range(TRIES):
            seen = await look(self.pool)
            if seen != "lost":
                return seen
        return "lost in every try"

    def checks(self) -> dict[str, bool]:
        """What has to hold."""
        said = [each for lines in self.found.values() for each in lines]
        return {
            "consistency: every planted device was found": bool(said)
            and all(each.startswith("found") for each in said),
            "consistency: a device begun anew agrees": all(each.endswith("then agree") for each in said),
        }

    def record(self) -> dict[str, Any]:
        """What is written down."""
        return {"planted": self.found, "kills beside it": self.kills}
