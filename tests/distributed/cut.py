"""A driver on one of two hosts, for `test_cut.py`: the network is cut under calls that have not begun."""

from __future__ import annotations

import asyncio
import json
import sys

import layerzero as lz
from benchmarks.hosting.namespaces import cut, mend
from layerzero.actors.remote.ray_device import RayDevice
from tests.distributed import hosted
from tests.waiting import LIMIT_S, until

STILL_S = 8.0
CALLS = 8


async def main(address: str, cable: str, path: str) -> None:
    """Print what became of the calls."""
    settings = lz.Settings(
        cluster=address,
        device="cpu",
        cluster_devices=2,
        perfdb=None,
        shipped_tables=False,
        hang_s=2.0,
        placement_timeout_s=LIMIT_S,
    )
    async with lz.start(settings) as runtime:
        pool = runtime.device_pool
        (name,) = [
            each.name for each in pool.devices.values()
            if isinstance(each, RayDevice) and each.address.host == "10.77.0.2"
        ]  # fmt: skip
        device = pool.devices[name]
        assert isinstance(device, RayDevice) and device._incarnation is not None
        life = device._incarnation
        still = asyncio.ensure_future(device.run(hosted.stand_still, STILL_S))
        await until(lambda: life.started)
        calls = [asyncio.ensure_future(device.run(hosted.mark, path, key)) for key in range(CALLS)]
        await asyncio.sleep(1.0)  # they arrive there, behind what stands still
        cut(cable)
        results = await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(STILL_S)  # the host that was cut off goes on meanwhile
        mend(cable)
        lost = await asyncio.gather(still, return_exceptions=True)
        said = {
            "answered": [key for key, got in enumerate(results) if got == key],
            "lost": [isinstance(got, lz.DeviceLostError) and not got.retryable for got in (*results, *lost)],
        }
        print("SAID " + json.dumps(said), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
