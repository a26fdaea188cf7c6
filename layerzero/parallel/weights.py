"""Weights of one rank: parts of tensors, read out of a checkpoint without the rest of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from layerzero.checkpoints.folder import TensorFolder, mismatch, on_device
from layerzero.parallel.layout import Layout
from layerzero.parallel.tensor import TensorGroup

# Which axis of a weight the ranks of a stage share out, by its module's name in Hugging Face's decoders:
# rows of what makes heads and columns, columns of what takes them, and the vocabulary.
AXES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1,
        "embed_tokens": 0, "lm_head": 0,
    }
)  # fmt: skip
KV_HEADS: Final = ("k_proj", "v_proj")
WHOLE_BYTES: Final = 1 << 26  # files up to this size are digested whole, larger ones by their blocks
BLOCKS: Final = 1024
BLOCK_BYTES: Final = 1 << 16


class WeightSource(Protocol):
    """What gives a model its weights, each by its name and with the shape that it must have."""

    def __call__(self, name: str, shape: tuple[int, ...], /) -> Any: ...


class FolderWeights:
    """The weights of a folder of safetensors files by name, as `dtype` on `device`: whole, or one part.

    Raises: FileNotFoundError, FormatError: as `TensorFolder`.
    """

    def __init__(
        self, folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self._tensors = TensorFolder(Path(folder))
        self._device, self._dtype = device, dtype

    def __call__(self, name: str, shape: tuple[int, ...], /) -> Tensor:
        """The whole of a weight. Raises: FormatError: there is none, or it has another shape."""
        self._need_shape(name, shape)
        return self._tensors.tensor(name).to(self._device, self._dtype)

    def part(self, name: str, shape: tuple[int, ...], axis: int, index: int, count: int) -> Tensor:
        """Part `index` of `count` along `axis` of a weight of the whole `shape`; the rest is not read.

        Raises: FormatError: there is none, or it has another shape. ValueError: `count` does not divide it.
        """
        self._need_shape(name, shape)
        size = _share(name, shape, axis, count)
        cut = slice(index * size, (index + 1) * size)
        stored = self._tensors.slice(name)
        tensor: Tensor = stored[cut] if axis == 0 else stored[(slice(None),) * axis + (cut,)]
        return on_device(tensor.to(self._dtype), self._device)

    @cached_property
    def digest(self) -> str:
        """The folder's name and a digest of its files, for `Layout(same=...)`.

        Files up to 64 MiB count whole, of larger ones the header and 1,024 blocks of 64 KiB, evenly spaced.
        """
        digest = hashlib.sha256()
        for file in sorted(self._tensors.files()):
            path = self._tensors.path / file
            size = path.stat().st_size
            digest.update(f"{file} {size}\n".encode())
            with path.open("rb") as opened:
                if size <= WHOLE_BYTES:
                    digest.update(opened.read())
                    continue
                digest.update(opened.read(int.from_bytes(opened.read(8), "little")))
                for block in range(BLOCKS):
                    opened.seek(block * (size - BLOCK_BYTES) // (BLOCKS - 1))
                    digest.update(opened.read(BLOCK_BYTES))
        return f"{self._tensors.path.name} {digest.hexdigest()[:16]}"

    def _need_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if (stored := self._tensors.shape(name)) != tuple(shape):
            raise mismatch(name, f"shape {tuple(shape)}", f"{stored} in {self._tensors.path}")


def shard_weights(
    get: WeightSource,
    group: TensorGroup,
    *,
    axes: Mapping[str, int] = AXES,
    kv_heads: int | None = None,
    whole: tuple[str, ...] = (),
) -> WeightSource:
    """`get` for one rank of `group`: asked with the shape of a rank's part, it gives that part.

    `axes` names the axis by the weight's module, `whole` modules that every rank has whole all the same. A
    bias of what takes columns is added once: rank 0 has it, others have zeros. Fewer `kv_heads` than ranks
    are repeated, one for several neighbours.
    Raises: ValueError: the ranks do not divide `kv_heads`, or the other way round. When called: ValueError,
        FormatError: what `get` raises, or a weight that does not divide.
    """
    kv_parts = min(group.ranks, kv_heads or group.ranks)
    if group.ranks % kv_parts or (kv_heads or group.ranks) % kv_parts:
        raise ValueError(f"ranks needs a divisor or a multiple of {kv_heads} kv_heads, got {group.ranks}")

    def part(name: str, shape: tuple[int, ...], /) -> Any:
        module, kind = name.rsplit(".", 2)[-2:]
        axis = axes.get(module)
        if axis is None or module in whole or group.ranks == 1:
            return get(name, shape)
        if kind == "bias" and axis:
            bias = get(name, shape)
            return torch.zeros_like(bias) if group.rank else bias
        count = kv_parts if module in KV_HEADS else group.ranks
        index = group.rank * count // group.ranks
        whole_shape = tuple(size * count if index == axis else size for index, size in enumerate(shape))
        read_part = getattr(get, "part", None)
        if read_part is not None:
            return read_part(name, whole_shape, axis, index, count)
        return get(name, whole_shape).chunk(count, axis)[index].contiguous()

    return part


def stage_weights(
    get: WeightSource, layout: Layout, layers: int, *, like: Tensor, tied: bool
) -> WeightSource:
    """`get` under the names that a decoder of this stage's layers alone asks for; empty for what others hold.

    `layers` counts the whole model's. The stage's layers begin at 0 for it, and its last norm is the one
    that the next stage begins with. `tied` says that the table of tokens is the head, too.
    """
    stage = layout.layers(layers)
    has_weight = {
        "model.embed_tokens.weight": layout.first or (layout.last and tied),
        "lm_head.weight": layout.last,
    }

    def piece(name: str, shape: tuple[int, ...], /) -> Any:
        if not has_weight.get(name, True):
            return like.new_empty(0)
        if name == "model.norm.weight" and not layout.last:
            return get(f"model.layers.{stage.stop}.input_layernorm.weight", shape)
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str(int(parts[2]) + stage.start)
        return get(".".join(parts), shape)

    return piece


def _share(name: str, shape: tuple[int, ...], axis: int, count: int) -> int:
    if shape[axis] % count:
        raise ValueError(f"{name} needs axis {axis} of a multiple of {count} ranks' parts, got {shape[axis]}")
    return shape[axis] // count
