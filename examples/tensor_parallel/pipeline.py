"""Pipeline stages of a Llama: each rank has some of the layers, and hands its rows to the next.

    torchrun --nproc-per-node 2 examples/tensor_parallel/run.py --stages

What a stage chooses does not depend on its rank: its ops see whole heads and whole columns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from models.llama import BLOCKING, GetWeight, LlamaConfig, kv_pool, run_sync
from torch import Tensor

import layerzero as lz
from layerzero.kvcache import AttentionMetadata
from tensor_parallel.llama import RankLlama

PAGES = 1024


def layers_of(layers: int, rank: int, ranks: int) -> range:
    """Which layers a rank has: as many as the others, or one more.

    Raises: ValueError: there are fewer layers than ranks.
    """
    if not 1 <= ranks <= layers:
        raise ValueError(f"ranks needs 1 to {layers} stages, one layer each at least, got {ranks}")
    return range(rank * layers // ranks, (rank + 1) * layers // ranks)


def stage_weights(get: GetWeight, layer_range: range, config: LlamaConfig, like: Tensor) -> GetWeight:
    """`get` under the names that a Llama of the layers `own` alone asks for; nothing for what others hold."""
    first, last = layer_range.start == 0, layer_range.stop == config.num_hidden_layers
    has_weight = {
        "model.embed_tokens.weight": first or (last and config.tie_word_embeddings),
        "lm_head.weight": last,
    }

    def piece(name: str, shape: tuple[int, ...]) -> Any:
        if not has_weight.get(name, True):
            return like.new_empty(0)
        if name == "model.norm.weight" and not last:
            return get(f"model.layers.{layer_range.stop}.input_layernorm.weight", shape)
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str(int(parts[2]) + layer_range.start)
        return get(".".join(parts), shape)

    return piece


class PipelineLlama(RankLlama):
    """One rank's layers of a Llama; the logits of a step come back to rank 0."""

    every_rank_has_logits = False

    def __init__(
        self, config: LlamaConfig, get: GetWeight, member: Any, like: Tensor, pages: int = PAGES
    ) -> None:
        """`like` has the dtype and the device of the weights.

        Raises: ValueError: there are fewer layers than ranks.
        """
        layer_range = layers_of(config.num_hidden_layers, member.rank, member.ranks)
        stage_config = replace(config, num_hidden_layers=len(layer_range))
        super().__init__(
            stage_config,
            stage_weights(get, layer_range, config, like),
            kv_pool(stage_config, like.device, like.dtype, pages, 16),
        )
        self.rank, self.final = member.rank, member.ranks - 1
        # What passes from stage to stage is sent and received: no graph holds that.
        self.join(member, "stage", alike=False, graphs=False)

    def logits_step(self, metadata: AttentionMetadata, ids: Tensor) -> Tensor:
        """What every rank runs; rank 0 gets the logits (B, V) of each sequence's last row."""
        like, config, rows = self.input_norm, self.config, len(ids)
        if self.rank:
            received = torch.empty(2, rows, config.hidden_size, dtype=like.dtype, device=like.device)
            dist.recv(received, self.rank - 1)
            normed, x = received.unbind()
        else:
            x = lz.sync.embedding(ids, self.embed_tokens)
            normed = lz.sync.rms_norm(x, self.input_norm, eps=config.rms_norm_eps)
        for layer in self.layers:
            normed, x = run_sync(layer.forward(BLOCKING, normed, x, metadata))
        if self.rank < self.final:
            dist.send(torch.stack([normed, x]), self.rank + 1)
            logits = torch.empty(
                len(metadata.seq_lens), config.vocab_size, dtype=like.dtype, device=like.device
            )
            if self.rank == 0:
                dist.recv(logits, self.final)
        else:
            logits = lz.sync.linear(normed[metadata.logits_indices], self.lm_head)
            if self.rank:
                dist.send(logits, 0)
        return logits
