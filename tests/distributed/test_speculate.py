"""Speculation over the ranks of a gang: the example under torchrun, with gloo between its shards."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import layerzero as lz
from layerzero.elsewhere import elsewhere
from tests.distributed import drafts

pytest.importorskip("safetensors", reason="the example needs safetensors")
pytest.importorskip("tokenizers", reason="the example needs tokenizers")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "speculate.py"


def test_two_ranks_accept_what_one_process_accepts(tmp_path: Path) -> None:
    """Four sampled texts, drafted on rank 0: each rank knows the text, one process's; no page leaks."""
    out = tmp_path / "speculation.json"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(EXAMPLE), "--tokens", "24",
        "--json", str(out),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
    first, second = json.loads(out.read_text())
    assert first["plan"] == second["plan"]
    assert first["tokens"] == first["alone"] and len(first["tokens"]) == 4
    for number, text in first["tokens"].items():
        assert len(text) == 24
        assert first["settled"][number][:24] == second["settled"][number][:24] == text
    assert all(0 < share < 1 for share in first["acceptance"]), "some drafts stay and some go"
    assert first["pages_leaked"] == second["pages_leaked"] == 0


@pytest.mark.ray
@pytest.mark.asyncio
@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_the_draft_lives_on_another_device_than_the_target(ray_cluster: Any) -> None:
    """Two actors: the text is that of one process, also where the draft's device dies in the middle."""
    options: dict[str, Any] = {"places": 3, "max_tokens": 40, "seed": 5}
    async with lz.start(lz.Settings(cluster="auto", device="cpu")) as runtime:
        here = lz.speculative.generate(drafts.Chain(1, 0.3), drafts.Chain(2, 0.0), [0, 1], **options)
        wanted = [token async for token in here]
        fleet = runtime.fleet
        assert fleet.facts[0].pid != fleet.facts[1].pid
        async with (
            asyncio.timeout(100),
            elsewhere(fleet, drafts.Chain, 1, 0.3, on="gpu-0") as draft,
            elsewhere(fleet, drafts.Chain, 2, 0.0, on="gpu-1") as target,
        ):
            generation = lz.speculative.generate(draft, target, [0, 1], **options)
            got: list[int] = []
            async for token in generation:
                got.append(token)
                if len(got) == 15:
                    assert [await fleet.run(drafts.opened, on=name) for name in ("gpu-0", "gpu-1")] == [
                        (fleet.facts[0].pid, ["chain 1"]), (fleet.facts[1].pid, ["chain 2"])
                    ]  # fmt: skip
                    os.kill(fleet.facts[0].pid, signal.SIGKILL)
            assert got == wanted and generation.stats.accepted == here.stats.accepted > 0
        assert (await fleet.health())[0].restarts == 1
        assert [(await fleet.run(drafts.opened, on=name))[1] for name in ("gpu-0", "gpu-1")] == [[], []]
