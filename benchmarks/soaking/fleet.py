"""Calls and generations on the devices of a cluster, and a rank group over two of them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.cluster import mark, tokens
from benchmarks.soaking.ends import ANSWERED, Ends
from layerzero.actors.remote.pool import DevicePool
from layerzero.actors.rpc.client import DeviceState
from tests.distributed import shards

PAUSE_S = 0.02  # of a caller between two calls
CANCELLED, LIMITED, IDEMPOTENT = 0.1, 0.1, 0.1  # shares of the calls
SOON_S = 0.05
LENGTH = 12
SEEDS = 40
CALLERS = 3
AGAIN = 128  # beside how a call ended: it may run again
PROGRESS = 10  # answers that a target has to give between two kills


def _code(how: str) -> int:
    """One byte for how a call ended: an answer, one that never began, another end."""
    return 0 if how == ANSWERED else 1 if how.endswith("nothing of it ran") else 2


class Fleet:
    """Callers of the whole pool; every execution is written to a file that outlives its device."""

    weight = 3.0

    def __init__(self, pool: DevicePool, path: Path, began_s: float, spare: str) -> None:
        self.pool, self.path, self.spare = pool, path, spare
        path.touch()
        self.ends = Ends("fleet", began_s)
        self.generations = Ends("generations", began_s)
        self.known = [bytearray() for _ in range(CALLERS)]  # by caller and turn, as `_code` has it
        self.running = True
        self._wanted: dict[int, list[int]] = {}
        self._killed, self._answers = 0, 0

    async def run(self) -> None:
        """Callers until `running` is taken back."""
        for seed in range(SEEDS):
            self._wanted[seed] = [t async for t in tokens(seed, LENGTH, 0.0)]
        await asyncio.gather(
            *(self._caller(c) for c in range(CALLERS)), *(self._generator(g) for g in range(2))
        )

    async def _caller(self, caller: int) -> None:
        draw, known = random.Random(caller), self.known[caller]
        while self.running:
            kind, soon = draw.random(), draw.uniform(0.0, SOON_S)
            limit = soon if CANCELLED <= kind < CANCELLED + LIMITED else None
            again, key = kind > 1 - IDEMPOTENT, caller + CALLERS * len(known)
            call = self.pool.run(mark, str(self.path), key, timeout_s=limit, idempotent=again)
            how = await self.ends.call(
                call, lambda got, key=key: got == key, soon if kind < CANCELLED else None
            )
            known.append(_code(how) + AGAIN * again)
            self._answers += how == ANSWERED
            await asyncio.sleep(draw.uniform(0, 2 * PAUSE_S))

    async def _generator(self, seed: int) -> None:
        while self.running:
            wanted = self._wanted[seed % SEEDS]

            async def text(number: int = seed % SEEDS) -> list[int]:
                return [t async for t in self.pool.stream(tokens, number, LENGTH, 0.01, resume=True)]

            await self.generations.call(text(), lambda got, wanted=wanted: got == wanted)
            seed += 2

    def ready(self) -> bool:
        """Whether the spare device has served since it was killed."""
        device = self.pool.devices[self.spare]
        fresh = device.facts.pid != self._killed and self._answers >= PROGRESS
        return device.state is DeviceState.RUNNING and fresh

    def strike(self, draw: random.Random) -> str:
        """SIGKILL of the device that is in no rank group."""
        self._killed, self._answers = self.pool.devices[self.spare].facts.pid, 0
        os.kill(self._killed, signal.SIGKILL)
        return "device killed"

    def executions(self) -> dict[str, int]:
        """What the file of executions says about the answers."""
        times = [bytearray(len(known)) for known in self.known]
        unknown = 0
        for line in self.path.read_text().split():
            turn, caller = divmod(int(line), CALLERS)
            if turn < len(times[caller]):
                times[caller][turn] = min(times[caller][turn] + 1, 255)
            else:
                unknown += 1
        pairs: Counter[tuple[int, int]] = Counter()
        for known, ran in zip(self.known, times, strict=True):
            pairs.update(zip(known, ran, strict=True))
        never, begun = _code("nothing of it ran"), {_code(ANSWERED), _code(ANSWERED) + AGAIN}
        return {
            "answered and never ran": sum(n for (how, ran), n in pairs.items() if how in begun and not ran),
            "ran twice": sum(n for (how, ran), n in pairs.items() if how < AGAIN and ran > 1),
            "ran, and said to be not begun": sum(
                n for (how, ran), n in pairs.items() if how == never and ran
            ),
            "ran, and nobody knows": unknown,
            "idempotent ones that ran again": sum(
                n for (how, ran), n in pairs.items() if how >= AGAIN and ran > 1
            ),
        }

    def checks(self) -> dict[str, bool]:
        """What has to hold once nothing is under way."""
        found = self.executions()
        found.pop("idempotent ones that ran again")
        nothing = {f"fleet: {what} is 0": count == 0 for what, count in found.items()}
        return {
            **self.ends.checks(),
            **self.generations.checks(),
            **nothing,
        }

    def record(self) -> dict[str, Any]:
        """What is written down."""
        restarts = {name: device.facts.incarnation for name, device in self.pool.devices.items()}
        return {
            "calls": self.ends.record(),
            "generations": self.generations.record(),
            "executions": self.executions(),
            "incarnations": restarts,
        }


class Gang:
    """Seeded texts, every token a step of two ranks with an all-reduce; a rank's death renews both."""

    weight = 2.0

    def __init__(self, pool: DevicePool, group: Any, began_s: float) -> None:
        self.pool, self.group = pool, group
        self.ends = Ends("rank group", began_s)
        self.running = True
        self.kills = 0
        self._epoch, self._answers = 0, 0

    async def run(self) -> None:
        """Callers until `running` is taken back; every fourth text may not resume."""
        await asyncio.gather(*(self._caller(c) for c in range(3)))

    async def _caller(self, seed: int) -> None:
        while self.running:
            wanted, resumes = shards.text(seed % SEEDS, LENGTH), seed % 4 != 3

            async def text(number: int = seed % SEEDS, resumes: bool = resumes) -> list[int]:
                stream = self.group.stream(shards.tokens, number, LENGTH, 0.01, resume=resumes)
                return [t async for t in stream]

            how = await self.ends.call(text(), lambda got, wanted=wanted: got == wanted)
            self._answers += how == ANSWERED
            seed += 3
            await asyncio.sleep(PAUSE_S)

    def ready(self) -> bool:
        """Whether this epoch has answered."""
        return self.group.epoch > self._epoch and self._answers >= PROGRESS

    def strike(self, draw: random.Random) -> str:
        """SIGKILL of either rank."""
        self._epoch, self._answers = self.group.epoch, 0
        rank = draw.randrange(self.group.ranks)
        os.kill(self.group.devices[rank].facts.pid, signal.SIGKILL)
        self.kills += 1
        return f"rank {rank} killed"

    def checks(self) -> dict[str, bool]:
        """What has to hold once nothing is under way."""
        began = self.group.restarts == self.group.epoch - 1
        return {
            **self.ends.checks(),
            "rank group: one new beginning a kill": began and self.group.restarts == self.kills,
        }

    def record(self) -> dict[str, Any]:
        """What is written down."""
        return {**self.ends.record(), "epochs": self.group.epoch, "kills": self.kills}
