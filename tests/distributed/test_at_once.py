"""Ten Ray actors that want the same kernel at once: one choice, one run of a real compiler, ten answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import layerzero as lz
from tests.waiting import LIMIT_S
from tests.warmup import racing
from tests.warmup.test_warmup import needs_compiler

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.asyncio,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    needs_compiler,
]


async def test_ten_actors_that_start_at_once_compile_and_choose_once(
    ray_cluster: Any, tmp_path: Path
) -> None:
    """Each has computed with the extension that one of them compiled."""
    racing.prepare(tmp_path, "1.0")
    settings = lz.Settings(
        cluster="auto", cluster_devices=10, cluster_devices_per_gpu=5, device="cpu", warm="off",
        shared_choices_s=300.0, placement_timeout_s=LIMIT_S,
    )  # fmt: skip
    async with lz.start(settings) as runtime:
        pool = runtime.device_pool
        names = list(pool.devices)
        assert len(names) == len({facts.pid for facts in pool.facts}) == 10
        found = await asyncio.gather(
            *(pool.run(racing.answer_of, str(tmp_path), "1.0", on=name) for name in names)
        )
    assert [version for _, version in racing.compiled(tmp_path)] == ["1.0"]
    assert all(each["right"] and each["kernel"] == racing.KERNEL for each in found)
    assert [each["versions"] for each in found] == [["1.0"]] * 10
    # The two choices of a warm-up: of the kernel that is to be loaded, and of the loaded one.
    assert sum(each["chosen"] for each in found) == 2
