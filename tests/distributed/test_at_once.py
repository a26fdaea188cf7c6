"""Ten Ray actors that want the same kernel at once: one choice, one run of a real compiler, ten answers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import layerzero as lz
from layerzero.actors.remote.pool import DevicePool
from tests.waiting import LIMIT_S, until, within
from tests.warmup import racing
from tests.warmup.test_warmup import needs_compiler

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.asyncio,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    needs_compiler,
]


@asynccontextmanager
async def ten_actors() -> AsyncIterator[DevicePool]:
    """A pool of ten, each a process."""
    settings = lz.Settings(
        cluster="auto", cluster_devices=10, cluster_devices_per_gpu=5, device="cpu", warm="off",
        shared_choices_s=300.0, placement_timeout_s=LIMIT_S,
    )  # fmt: skip
    async with lz.start(settings) as runtime:
        pool = runtime.device_pool
        assert len(pool.devices) == len({facts.pid for facts in pool.facts}) == 10
        yield pool


async def test_ten_actors_that_start_at_once_compile_and_choose_once(
    ray_cluster: Any, tmp_path: Path
) -> None:
    """Each has computed with the extension that one of them compiled."""
    racing.prepare(tmp_path, "1.0")
    async with ten_actors() as pool:
        found = await asyncio.gather(
            *(pool.run(racing.answer_of, str(tmp_path), "1.0", on=name) for name in pool.devices)
        )
    assert [version for _, version in racing.compiled(tmp_path)] == ["1.0"]
    assert all(each["right"] and each["kernel"] == racing.KERNEL for each in found)
    assert [each["versions"] for each in found] == [["1.0"]] * 10
    # The two choices of a warm-up: of the kernel that is to be loaded, and of the loaded one.
    assert sum(each["chosen"] for each in found) == 2


async def test_an_actor_that_is_killed_at_its_compiler_is_replaced(ray_cluster: Any, tmp_path: Path) -> None:
    """SIGKILL while its compiler is under way: one of the nine others compiles, and all nine have its answer.

    Its call is a lost one, which does not run again. What it was about to make counts for nobody.
    """
    racing.prepare(tmp_path, "1.0")
    (tmp_path / "hold").touch()
    async with ten_actors() as pool:
        calls = {
            facts.pid: asyncio.ensure_future(pool.run(racing.answer_of, str(tmp_path), "1.0", on=facts.name))
            for facts in pool.facts
        }
        await until((tmp_path / "held").exists)
        ((leader, _),) = racing.compiled(tmp_path)
        lost = calls.pop(leader)
        os.kill(leader, signal.SIGKILL)
        found = await within(asyncio.gather(*calls.values()))
        with pytest.raises(lz.DeviceLostError):
            await within(lost)
        (tmp_path / "go").touch()  # the dead one's compiler ends as well, and changes nothing
    assert all(each["right"] and each["kernel"] == racing.KERNEL for each in found)
    assert [each["versions"] for each in found] == [["1.0"]] * 9
    (_, (successor, _)) = racing.compiled(tmp_path)
    assert successor in calls
    assert sum(each["chosen"] for each in found) <= 2  # the dead one may have made the first choice
