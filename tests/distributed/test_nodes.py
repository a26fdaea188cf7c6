"""The loss of a node of two: its device is lost, the other serves, and a new node brings it back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import layerzero as lz
from layerzero.actors.port import DeviceState
from tests.distributed import hosted, shards
from tests.distributed.conftest import BARE

pytestmark = [pytest.mark.ray, pytest.mark.asyncio, pytest.mark.filterwarnings("ignore::ResourceWarning")]


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


async def test_a_lost_node_costs_its_device_alone(nodes: Any) -> None:
    """Streams move on, the other device serves, calls to the lost one fail in time, a new node revives it."""
    settings = lz.Settings(cluster="auto", device="cpu", placement_timeout_s=15.0)
    async with lz.start(settings) as runtime:
        fleet = runtime.fleet
        assert len(fleet.nodes) == 2
        second = nodes.list_all_nodes()[1]
        (lost,) = fleet.nodes[second.node_id]
        (kept,) = set(fleet.devices) - {lost}
        first = asyncio.Event()

        async def generation(seed: int) -> list[int]:
            got = []
            async for token in fleet.stream(hosted.tokens, seed, 25, 0.02, resume=True):
                got.append(token)
                first.set()
            return got

        tasks = [asyncio.ensure_future(generation(seed)) for seed in range(6)]
        await first.wait()
        nodes.remove_node(second, allow_graceful=False)
        assert await fleet.run(hosted.add, 1, on=kept) == 2
        assert await fleet.run(hosted.add, 1) == 2
        for _ in range(400):  # the worker ends when it has noticed that its raylet did
            if fleet.devices[lost].state is not DeviceState.RUNNING:
                break
            await asyncio.sleep(0.02)
        with pytest.raises(lz.DeviceLostError) as refused:
            await fleet.run(hosted.add, 1, on=lost)
        assert refused.value.retryable
        assert fleet.devices[lost].state is DeviceState.RESTARTING
        for seed, tokens in enumerate(await asyncio.gather(*tasks)):
            assert tokens == [t async for t in hosted.tokens(seed, 25)]
        nodes.add_node(num_cpus=2, num_gpus=1, **BARE)
        for _ in range(400):
            if fleet.devices[lost].state is DeviceState.RUNNING:
                break
            await asyncio.sleep(0.1)
        assert await fleet.run(hosted.add, 1, on=lost) == 2


async def test_a_gang_that_loses_a_node_goes_on_under_a_new_epoch(nodes: Any) -> None:
    """A rank on each of two nodes; one node goes, another comes: texts that may resume are whole."""
    settings = lz.Settings(
        cluster="auto", device="cpu", inference=True, perfdb=None, placement_timeout_s=60.0
    )
    async with (
        asyncio.timeout(150),
        lz.start(settings) as runtime,
        runtime.gang(2, build=shards.shard, timeout_s=30.0) as gang,
    ):
        assert len({each.facts.node for each in gang.devices}) == 2
        pids = {each.facts.pid for each in gang.devices}
        first = asyncio.Event()

        async def text(seed: int, n: int, resume: bool) -> list[int]:
            got = []
            async for token in gang.stream(shards.tokens, seed, n, 0.02, resume=resume):
                got.append(token)
                first.set()
            return got

        resumed = [asyncio.ensure_future(text(seed, 40, True)) for seed in range(4)]
        cut = asyncio.ensure_future(text(9, 10_000, False))
        await first.wait()
        nodes.remove_node(nodes.list_all_nodes()[1], allow_graceful=False)
        with pytest.raises(lz.DeviceLostError):
            await cut
        nodes.add_node(num_cpus=2, num_gpus=1, **BARE)
        assert await asyncio.gather(*resumed) == [shards.text(seed, 40) for seed in range(4)]
        assert gang.epoch >= 2 and not pids & {each.facts.pid for each in gang.devices}
        assert len({each.facts.node for each in gang.devices}) == 2
