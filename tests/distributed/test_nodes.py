"""The loss of a node of two: its device is lost, the other serves, and a new node brings it back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

import layerzero as lz
from layerzero.actors.rpc.client import DeviceState
from tests.distributed import forked, hosted, shards
from tests.distributed.conftest import BARE
from tests.waiting import LIMIT_S, until, within

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning")]
on_one_loop = pytest.mark.asyncio(loop_scope="module")
EXAMPLE = forked.ROOT / "examples" / "tensor_parallel" / "run.py"


@pytest.fixture(scope="module")
def nodes(ray: Any) -> Iterator[Any]:
    """Two nodes of one logical GPU each, in this machine; a dead one is noticed within some seconds."""
    from ray.cluster_utils import Cluster

    config = {"health_check_period_ms": 500, "health_check_failure_threshold": 6}
    head = {"num_cpus": 2, "num_gpus": 1, "_system_config": config, **BARE}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=2, num_gpus=1, **BARE)
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime(nodes: Any) -> AsyncIterator[lz.Runtime]:
    """A device on each node."""
    settings = lz.Settings(
        cluster="auto", device="cpu", inference=True, perfdb=None, placement_timeout_s=LIMIT_S
    )
    async with lz.start(settings) as runtime:
        yield runtime


# First: it needs both places for devices of its own.
@pytest.mark.slow
def test_ranks_of_the_tensor_parallel_example_are_actors_on_two_nodes(nodes: Any, tmp_path: Path) -> None:
    """The same tokens from shards on two nodes, with coroutines, streams and manifests between them."""
    pytest.importorskip("safetensors", reason="the example needs safetensors")
    pytest.importorskip("tokenizers", reason="the example needs tokenizers")
    out = tmp_path / "tp.json"
    command = [str(EXAMPLE), "--cluster", nodes.address, "--tokens", "8", "--json", str(out)]
    done = forked.run(command, tmp_path, 170)
    assert done.returncode == 0, done
    said = json.loads(out.read_text())
    assert (said["ranks"], said["nodes"], said["epoch"]) == (2, 2, 1)
    assert said["texts_as_one_device"] == said["requests"] == 8


@on_one_loop
async def test_a_lost_node_costs_its_device_alone(nodes: Any, runtime: lz.Runtime) -> None:
    """Streams move on, the other device serves, calls to the lost one fail in time, a new node revives it."""
    pool = runtime.device_pool
    assert len(pool.nodes) == 2
    second = nodes.list_all_nodes()[1]
    (name,) = pool.nodes[second.node_id]
    (kept,) = set(pool.devices) - {name}
    lost = pool.devices[name]
    first = asyncio.Event()

    async def generation(seed: int) -> list[int]:
        got = []
        async for token in pool.stream(hosted.tokens, seed, 25, 0.02, resume=True):
            got.append(token)
            first.set()
        return got

    tasks = [asyncio.ensure_future(generation(seed)) for seed in range(6)]
    await first.wait()
    nodes.remove_node(second, allow_graceful=False)
    assert await pool.run(hosted.add, 1, on=kept) == 2
    assert await pool.run(hosted.add, 1) == 2
    # The worker ends when it has noticed that its raylet did.
    await until(lambda: lost.state is not DeviceState.RUNNING)
    # From here on; no first life would be there so soon.
    settings = lost._spec.settings.replace(placement_timeout_s=2.0)  # type: ignore[attr-defined]
    lost._spec = msgspec.structs.replace(lost._spec, settings=settings)  # type: ignore[attr-defined]
    with pytest.raises(lz.DeviceLostError) as refused:
        await pool.run(hosted.add, 1, on=name)
    assert refused.value.retryable
    assert lost.state is DeviceState.RESTARTING
    for seed, tokens in enumerate(await asyncio.gather(*tasks)):
        assert tokens == [t async for t in hosted.tokens(seed, 25)]
    # A call to whichever device ends too, where the other one takes none.
    pool._patience_s = 2.0
    assert await pool.drain(LIMIT_S, on=kept)
    with pytest.raises(
        lz.DeviceLostError, match="no device came back within placement_timeout_s=2"
    ) as nowhere:
        await within(pool.run(hosted.add, 1))
    assert nowhere.value.retryable
    await pool.devices[kept].restart()
    pool._patience_s = LIMIT_S
    nodes.add_node(num_cpus=2, num_gpus=1, **BARE)
    await until(lambda: lost.state is DeviceState.RUNNING)
    assert await pool.run(hosted.add, 1, on=name) == 2
    settings = settings.replace(placement_timeout_s=LIMIT_S)
    lost._spec = msgspec.structs.replace(lost._spec, settings=settings)  # type: ignore[attr-defined]


@on_one_loop
async def test_a_gang_that_loses_a_node_goes_on_under_a_new_epoch(nodes: Any, runtime: lz.Runtime) -> None:
    """A rank on each of two nodes; one node goes, another comes: texts that may resume are whole."""
    async with lz.remote_rank_group(shards.shard, 2, timeout_s=30.0) as group:
        assert len({each.facts.node for each in group.devices}) == 2
        pids = {each.facts.pid for each in group.devices}
        begun: set[int] = set()

        async def text(seed: int, n: int, resume: bool) -> list[int]:
            got = []
            async for token in group.stream(shards.tokens, seed, n, 0.02, resume=resume):
                got.append(token)
                begun.add(seed)
            return got

        resumed = [asyncio.ensure_future(text(seed, 40, True)) for seed in range(4)]
        cut = asyncio.ensure_future(text(9, 10_000, False))
        await until(lambda: 9 in begun)  # before its first token it would wait for the next epoch
        nodes.remove_node(nodes.list_all_nodes()[1], allow_graceful=False)
        with pytest.raises(lz.DeviceLostError):
            await cut
        nodes.add_node(num_cpus=2, num_gpus=1, **BARE)
        assert await asyncio.gather(*resumed) == [shards.text(seed, 40) for seed in range(4)]
        assert group.epoch >= 2 and not pids & {each.facts.pid for each in group.devices}
        assert len({each.facts.node for each in group.devices}) == 2
