"""One rank of a measurement: its device, its group, and the rows that it writes one by one."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from generating.device_side import deny_for_graphs
from models.llama import LlamaConfig
from tensor_parallel.run import LLAMA_3_8B, config_and_weights
from torch import Tensor

import layerzero as lz
from layerzero.native import COMPILING, FAST_PATH

TINY = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, head_dim=16, rms_norm_eps=1e-5, rope_theta=1e4,
    max_position_embeddings=512,
)  # fmt: skip


@dataclass
class Rank:
    """Who this process is, what it measures and where the numbers go."""

    out: Path
    part: str
    layers: int
    deadline: float
    rehearse: bool
    rank: int = int(os.environ.get("RANK", "0"))
    ranks: int = int(os.environ.get("WORLD_SIZE", "1"))
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left_out = self.leave_out()
        cuda = not self.rehearse
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        self.like = torch.empty(0, device=self.device, dtype=torch.bfloat16 if cuda else torch.float32)
        self.config = (
            replace(LLAMA_3_8B, num_hidden_layers=self.layers, max_position_embeddings=4096 * 4)
            if cuda
            else TINY
        )

    @property
    def settings(self) -> lz.Settings:
        """A runtime for this rank's device; better kernels are loaded before the first call returns."""
        return lz.Settings(device=str(self.device), inference=True, perfdb=None, warm="eager", freeze_gc=True)

    def open(self) -> None:
        """Join the process group: NCCL between GPUs, gloo between CPUs."""
        own = self.device if self.device.type == "cuda" else None
        if own is None:
            torch.set_num_threads(1)
        else:
            torch.cuda.set_device(own)
        dist.init_process_group("nccl" if own else "gloo", timeout=timedelta(seconds=60), device_id=own)

    def leave_out(self) -> str:
        """Leave out what of FlashInfer is not built ahead, or no graph can take; what that is, and why."""
        if libraries()["flashinfer"] is None:
            return "FlashInfer is missing: torch's kernels and Triton's"
        return deny_for_graphs()

    def weights(self) -> Any:
        """How to get the whole random weights of the model, the same on every rank."""
        asked = argparse.Namespace(layers=self.config.num_hidden_layers, folder=None)
        get: Any = config_and_weights(asked, self.like)[1]
        return get

    def row(self, **said: Any) -> None:
        """Write one row down, behind those before it."""
        self.rows.append(said)
        path = self.out / f"{self.part}.rank{self.rank}.json"
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(self.rows))
        draft.replace(path)
        print(json.dumps(said), flush=True)

    @contextmanager
    def trying(self, **what: Any) -> Iterator[None]:
        """Write down what the block raises, and go on behind it."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.row(**what, error=f"{type(error).__name__}: {error}"[:500])

    @property
    def left_s(self) -> float:
        """Seconds until the part is to end."""
        return self.deadline - time.time()

    def done(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


async def compiled() -> str:
    """Wait for the awaited path's compiled twin, which a new machine has to make; what runs it then."""
    FAST_PATH.start()
    while FAST_PATH.state == COMPILING:  # noqa: ASYNC110  a thread compiles, and tells nobody
        await asyncio.sleep(0.1)
    return FAST_PATH.describe()


def libraries() -> dict[str, str | None]:
    """The versions of what brings kernels; None for what is missing."""
    found: dict[str, str | None] = {}
    names = {"flashinfer": "flashinfer-python", "triton": "triton", "flash_attn": "flash-attn",
             "flash_attn_4": "flash-attn-4", "xformers": "xformers"}  # fmt: skip
    for name, distribution in names.items():
        try:
            found[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def gathered(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, lengths: Tensor,
    offsets: Tensor | None = None, *_: Any,
) -> Tensor:  # fmt: skip
    """Paged attention out of torch's parts, for a GPU without a library: gather the pages, mask, SDPA."""
    size, groups = k_cache.shape[1], q.shape[1] != k_cache.shape[2]
    keys, values = (p[tables.long()].flatten(1, 2).transpose(1, 2) for p in (k_cache, v_cache))
    at = torch.arange(tables.shape[1] * size, device=q.device)
    if offsets is None:
        seen = (at < lengths[:, None])[:, None, None]
        rows, mine = q.unsqueeze(2), slice(None)
    else:
        counts = (offsets[1:] - offsets[:-1]).long()
        width = int(counts.max())
        nth = torch.arange(width, device=q.device)
        own: Any = nth < counts[:, None]
        seen = (at < (lengths - counts)[:, None, None] + nth[None, :, None] + 1)[:, None]
        wide = q.new_zeros(len(counts), width, *q.shape[1:])
        wide[own] = q
        rows, mine = wide.transpose(1, 2), own
    out = torch.nn.functional.scaled_dot_product_attention(
        rows, keys, values, attn_mask=seen, enable_gqa=groups
    )
    found: Tensor = out.squeeze(2) if offsets is None else out.transpose(1, 2)[mine]
    return found


def plant_attention(runtime: lz.Runtime) -> str:
    """Register `gathered` where no library brings paged attention for this device; what it is called."""
    kernels = [k for k in runtime.device().kernels() if k.op == "paged_attention"]
    platform = runtime.device().hardware.platform
    blocked = runtime.device().registry.blocked()
    here = [k.id for k in kernels if platform in k.capability.platforms and k.id not in blocked]
    if platform != "cuda" or any(not name.startswith(("reference.", "flashinfer.")) for name in here):
        return ""
    runtime.add_kernel(
        lz.Kernel(
            id="bench.paged_attention.gathered", op="paged_attention", backend="bench",
            capability=lz.Capability(
                source="whatever this benchmark asks", platforms=frozenset({"cuda"}),
                features=frozenset({"causal", "gqa", "scale", "prefill"}), layouts=frozenset({"NHD"}),
                graph_safe=True,  # where each sequence has one row, and only such steps are captured
            ),
            load=lambda: gathered, efficiency=lz.Efficiency(0.5, 0.5, 1.0, "so that it is taken"),
        )
    )  # fmt: skip
    return "bench.paged_attention.gathered"
