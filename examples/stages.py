"""Pipeline stages of a Llama: each rank has some of the layers, and hands its rows to the next.

    torchrun --nproc-per-node 2 examples/tp_generate.py --stages

What a stage chooses does not depend on its rank: its ops see whole heads and whole columns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from led import Led
from llama import BLOCKING, Config, Get, finished, pool
from torch import Tensor

import layerzero as lz
from layerzero.kvcache import Rows

PAGES = 1024


def layers_of(layers: int, rank: int, ranks: int) -> range:
    """Which layers a rank has: as many as the others, or one more.

    Raises: ValueError: there are fewer layers than ranks.
    """
    if not 1 <= ranks <= layers:
        raise ValueError(f"ranks needs 1 to {layers} stages, one layer each at least, got {ranks}")
    return range(rank * layers // ranks, (rank + 1) * layers // ranks)


def staged(get: Get, own: range, config: Config, like: Tensor) -> Get:
    """`get` under the names that a Llama of the layers `own` alone asks for; nothing for what others hold."""
    first, last = own.start == 0, own.stop == config.layers
    held = {"model.embed_tokens.weight": first or (last and config.tied), "lm_head.weight": last}

    def piece(name: str, shape: tuple[int, ...]) -> Tensor:
        if not held.get(name, True):
            return like.new_empty(0)
        if name == "model.norm.weight" and not last:
            return get(f"model.layers.{own.stop}.input_layernorm.weight", shape)
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str(int(parts[2]) + own.start)
        return get(".".join(parts), shape)

    return piece


class Stage(Led):
    """One rank's layers of a Llama; the logits of a step come back to rank 0."""

    def __init__(self, config: Config, get: Get, member: Any, like: Tensor, pages: int = PAGES) -> None:
        """`like` has the dtype and the device of the weights.

        Raises: ValueError: there are fewer layers than ranks.
        """
        own = layers_of(config.layers, member.rank, member.ranks)
        here = replace(config, layers=len(own))
        super().__init__(here, staged(get, own, config, like), pool(here, like.device, like.dtype, pages, 16))
        self.rank, self.final = member.rank, member.ranks - 1
        self.lead(member, "stage", alike=False)

    def logits(self, ids: Tensor, at: Rows) -> Tensor:
        """What every rank runs; rank 0 gets the logits (B, V) of each sequence's last row."""
        like, config, rows = self.norm_first, self.config, len(ids)
        if self.rank:
            both = torch.empty(2, rows, config.channels, dtype=like.dtype, device=like.device)
            dist.recv(both, self.rank - 1)
            normed, x = both.unbind()
        else:
            x = lz.sync.embedding(ids, self.words)
            normed = lz.sync.rms_norm(x, self.norm_first, eps=config.eps)
        for layer in self.layers:
            normed, x = finished(layer.forward(BLOCKING, normed, x, at))
        if self.rank < self.final:
            dist.send(torch.stack([normed, x]), self.rank + 1)
            logits = torch.empty(len(at.lengths), config.vocab, dtype=like.dtype, device=like.device)
            if self.rank == 0:
                dist.recv(logits, self.final)
        else:
            logits = lz.sync.linear(normed[at.last], self.head)
            if self.rank:
                dist.send(logits, 0)
        return logits
