"""The sweep over tiles of products of codes: its arms are cuts that a card has room for; its small run."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import popen

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from layerzero.backends.cuda_kernels import products  # noqa: E402

quantized_tiles: Any = importlib.import_module("quantized_tiles")  # a script beside its neighbours

SHARED = 227 * 1024  # of a block on Hopper
OURS = ("cuda.quantized_linear.four_bits",)


def test_every_tile_fits_a_block_and_replaces_what_the_product_asks() -> None:
    """For many rows all of them, for few only such as are not mostly empty; back to the own choice after."""
    arms = list(quantized_tiles.own_tiles(OURS, 4096))
    assert len(arms) == len(quantized_tiles.CUDA_TILES) * len(quantized_tiles.PARTS)
    assert len({name for name, *_ in arms}) == len(arms)
    chosen = products.plan_of
    for _, _, module, values in arms:
        with quantized_tiles.patched(module, values):
            plan = products.plan_of("int4", 256, 14336, 4096, quantized_tiles.torch.bfloat16)
            assert plan is values["plan_of"] and isinstance(plan, products.Tile)
            assert plan.shared <= SHARED and products.parts_of(112, 32, 132, False) == values["parts_of"]
    assert products.plan_of is chosen
    assert all("256x" not in name for name, *_ in quantized_tiles.own_tiles(OURS, 64))


def test_tiles_of_triton_hold_a_group() -> None:
    """Groups of 128 are cut, never joined; parts divide what K has of tiles."""
    pytest.importorskip("triton")
    for *_, values in quantized_tiles.own_tiles(("triton.quantized_linear.codes",), 4096):
        depth = values["tiles_of"].inner
        assert 128 % depth == 0 and quantized_tiles.INNER // depth % values["splits_of"] == 0


def test_it_runs_in_small() -> None:
    """Each kernel of this machine beside bfloat16, with its error."""
    script = ROOT / "benchmarks" / "quantized_tiles.py"
    run = popen.run([sys.executable, str(script), "--rehearse"], check=True)
    assert "2 bfloat16 {'us':" in run.stdout and "torch.quantized_linear.widened {'error':" in run.stdout
    assert "failed" not in run.stdout
