"""The device of this process as its fleet sees it: no ray, no other loop, and a child that begins anew."""

from __future__ import annotations

from pathlib import Path

from tests import children


def test_the_local_port_loads_no_ray(tmp_path: Path) -> None:
    """A process that names no cluster never imports ray: fleet, streams, tensors and control included."""
    code = (
        "import asyncio, sys, torch, layerzero as lz\n"
        "async def f(x): return await lz.rms_norm(x)\n"
        "async def main():\n"
        "    async with lz.start() as rt:\n"
        "        h = await rt.fleet.ship(torch.ones(2, 8), to=None)\n"
        "        await rt.fleet.run(f, h)\n"
        "        await rt.fleet.device().control('ping', 1)\n"
        "        await rt.fleet.rolling_restart()\n"
        "asyncio.run(main())\n"
        "print([m for m in sys.modules if m == 'ray' or m.startswith('ray.')])\n"
    )
    done = children.run(code, folder=tmp_path)
    assert done.stdout.strip() == "[]", done.stderr
