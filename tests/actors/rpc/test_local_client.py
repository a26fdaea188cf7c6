"""The device of this process as its pool sees it: no ray, no other loop, and a child that begins anew."""

from __future__ import annotations

from pathlib import Path

from tests import children


def test_the_local_port_loads_no_ray(tmp_path: Path) -> None:
    """A process that names no cluster never imports ray: pool, streams, tensors and control included."""
    code = (
        "import asyncio, sys, torch, layerzero as lz\n"
        "async def f(x): return await lz.rms_norm(x)\n"
        "async def main():\n"
        "    async with lz.start() as rt:\n"
        "        h = await rt.device_pool.ship(torch.ones(2, 8), to=None)\n"
        "        await rt.device_pool.run(f, h)\n"
        "        await rt.device_pool.device().control('ping', 1)\n"
        "        await rt.device_pool.rolling_restart()\n"
        "asyncio.run(main())\n"
        "print([m for m in sys.modules if m == 'ray' or m.startswith('ray.')])\n"
    )
    done = children.run(code, folder=tmp_path)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_lost_device_names_what_happened_to_it(tmp_path: Path) -> None:
    """The error of a call that met a sticky fault has the fault as its cause; no call is taken afterwards."""
    code = (
        "import asyncio, layerzero as lz\n"
        "def f(): raise RuntimeError('CUDA error: device-side assert triggered')\n"
        "async def main():\n"
        "    async with lz.start() as rt:\n"
        "        for _ in range(2):\n"
        "            try: await rt.device_pool.run(f)\n"
        "            except lz.DeviceLostError as e: print(repr(e.__cause__), '|', e)\n"
        "asyncio.run(main())\n"
    )
    done = children.run(code, folder=tmp_path)
    first, second = done.stdout.strip().splitlines()
    assert first.startswith("RuntimeError('CUDA error: device-side assert triggered')"), done.stderr
    assert second.startswith("None") and "is dead" in second
