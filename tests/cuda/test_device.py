"""What a card tells about itself, and a card that is lost: its process knows, its neighbours work on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import layerzero as lz
from layerzero.measure import conditions
from layerzero.spec import tolerances
from tests import children

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="what is asked of a card needs a CUDA device"),
]


def test_sensors_are_read_and_kept_in_buckets() -> None:
    """NVIDIA's library answers in degrees and watts; they are kept in steps of 5 and 50."""
    celsius, watts = conditions._sensors(0)
    assert celsius is not None and 10 <= celsius <= 110
    assert watts is not None and 20 <= watts <= 1500
    found = conditions.read_conditions(torch.device("cuda:0"))
    assert found.temperature_c is not None and found.temperature_c % 5 == 0
    assert abs(found.temperature_c - celsius) <= 10
    assert found.power_w is not None and found.power_w % 50 == 0
    assert found.free_bytes is not None and found.free_bytes & (found.free_bytes - 1) == 0
    assert found.free_bytes <= torch.cuda.mem_get_info()[1]


ASSERTED = """
import asyncio, os
import torch
import layerzero as lz

def reads_beyond():
    table = torch.ones(4, 64, device="cuda")
    rows = table[torch.tensor([10 ** 6], device="cuda")]
    return lz.sync.rms_norm(rows).cpu()

async def main():
    async with lz.start(lz.Settings(device="cuda", warm="off", perfdb=None)) as runtime:
        for _ in range(2):
            try:
                await runtime.device_pool.run(reads_beyond)
            except Exception as error:
                cause, chain = error.__cause__, []
                while cause is not None:
                    chain.append(f"{type(cause).__name__} {cause}")
                    cause = cause.__cause__
                causes = " / ".join(chain).replace(chr(10), " ")
                print(type(error).__name__, "|", error, "|", causes, flush=True)
        os._exit(0)  # a context that is lost has nothing to tidy up

asyncio.run(main())
"""


def test_a_lost_device_says_why_and_takes_nobody_with_it(tmp_path: Path) -> None:
    """A device-side assert elsewhere: DeviceLostError with its cause there, and this process works on."""
    x = torch.ones(3, 64, device="cuda")
    done = children.run(ASSERTED, folder=tmp_path)
    lines = [line for line in done.stdout.splitlines() if "|" in line]
    assert len(lines) == 2, done.stdout + done.stderr
    kind, text, cause = (part.strip() for part in lines[0].split("|"))
    assert kind == "DeviceLostError" and "device-side assert triggered" in text, lines[0]
    assert "device-side assert triggered" in cause, lines[0]
    assert lines[1].startswith("DeviceLostError") and "is dead" in lines[1], lines[1]
    with lz.start(lz.Settings(device="cuda", warm="off", perfdb=None), scoped=True):
        assert torch.allclose(lz.sync.rms_norm(x), x)


def test_products_in_tf32_have_a_bound_of_their_own() -> None:
    """With TF32 on, a float32 product errs more than without, and less than the bound that is its own."""
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = (torch.randn(256, 1024, generator=generator, device="cuda") for _ in range(2))
    exact = x.double() @ weight.double().T

    def error() -> float:
        out = lz.sync.linear(x, weight, backend="torch").double()
        return float((out - exact).norm() / exact.norm())

    with lz.start(lz.Settings(device="cuda", warm="off", perfdb=None), scoped=True):
        full = error()
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            rounded = error()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False
    assert full < 1e-6 < rounded < tolerances.TF32
