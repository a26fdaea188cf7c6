"""A folder of quantized weights as a mapping by name: codes as such, everything else as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from layerzero.checkpoints.conventions import CONVENTIONS, QuantizationConfig, claim_of
from layerzero.checkpoints.folder import TensorFolder, mismatch, on_device
from layerzero.checkpoints.readers import WeightTensors
from layerzero.formats import QuantizedTensor
from layerzero.formats.checks import need_device
from layerzero.formats.errors import FormatError

# What reading parts raises whose axes, sizes or options are none that their convention has.
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def load_quantized(folder: str | Path, *, device: torch.device | str = "cpu") -> QuantizedCheckpoint:
    """Open a folder of quantized weights, each read when it is asked for.

    It may be stored as compressed-tensors, AWQ, GPTQ, bitsandbytes (NF4), gpt-oss (MXFP4), ModelOpt (FP8,
    NVFP4) or DeepSeek (FP8 by block) do.

    Args: folder has config.json and safetensors files; nothing in it is executed or unpickled.
    Raises: FileNotFoundError: one of them is missing. FormatError, with a reason code: the configuration
        names no format that is read here, or claims one that the tensors do not have. TypeError, ValueError:
        folder is no path, or device none of torch's.
    """
    if not isinstance(folder, str | Path):
        raise TypeError(f"folder needs a path, got {type(folder).__name__}")
    return QuantizedCheckpoint(Path(folder), device)


class QuantizedCheckpoint(Mapping[str, Tensor | QuantizedTensor]):
    """The weights of a folder by name, `QuantizedTensor` where they are codes.

    A quantized weight has its module's name and `.weight`, whatever its parts are called; gpt-oss's experts
    have their own. Asking for one checks its parts, and raises FormatError where they are another format's,
    or codes whose scales are missing.

    Example:
        checkpoint = lz.load_quantized("llama-awq")
        weight = checkpoint["model.layers.0.mlp.down_proj.weight"]
        out = lz.sync.quantized_linear(x, **weight.arguments())
    """

    def __init__(self, folder: Path, device: torch.device | str = "cpu") -> None:
        self._claim: QuantizationConfig = claim_of(folder)
        self._tensors = TensorFolder(folder)
        self._device = need_device(device)
        convention = self._claim.convention
        self._modules = {
            name.removesuffix(convention.mark) + convention.name: name.removesuffix(convention.mark)
            for name in self._tensors.names
            if name.endswith(convention.mark)
        }
        if not self._modules:
            raise self._not_held()
        hidden = {module + end for module in self._modules.values() for end in convention.parts}
        self._plain = {name: None for name in self._tensors.names if name not in hidden}
        # What the folder claims is held against one weight now, and against the others when they are read.
        self[next(iter(self._modules))]

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self._tensors.path

    @property
    def method(self) -> str:
        """The library whose convention the folder follows, as its configuration names it."""
        return self._claim.convention.method

    @property
    def says(self) -> str:
        """The format, as the configuration names it."""
        return self._claim.says

    @property
    def quantized(self) -> tuple[str, ...]:
        """The names of the weights that are codes."""
        return tuple(self._modules)

    def __getitem__(self, name: str) -> Tensor | QuantizedTensor:
        module = self._modules.get(name)
        if module is None:
            if name not in self._plain:
                raise KeyError(name)
            self._need_numbers(name)
            return on_device(self._tensors.tensor(name), self._device)
        parts = WeightTensors(
            module, self._claim.says, self._claim.options,
            lambda end: self._tensors.tensor(module + end), lambda end: module + end in self._tensors,
        )  # fmt: skip
        try:
            weight: QuantizedTensor = self._claim.convention.read(parts)
        except FormatError:
            raise
        except _UNREADABLE as error:
            raise parts.mismatch(f"{name} in parts that fit each other", error) from error
        return weight.to(self._device)

    def __contains__(self, name: object) -> bool:
        return name in self._modules or name in self._plain

    def __iter__(self) -> Iterator[str]:
        return iter((*self._modules, *self._plain))

    def __len__(self) -> int:
        return len(self._modules) + len(self._plain)

    def __repr__(self) -> str:
        return (
            f"QuantizedCheckpoint({self.method} {self.says}, {len(self._modules)} of {len(self)} weights "
            f"quantized, {self.folder})"
        )

    def dequantized(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A weight as numbers of `dtype`, computed in float32."""
        weight = self[name]
        return weight.dequantize(dtype) if isinstance(weight, QuantizedTensor) else weight.to(dtype)

    def check(self) -> None:
        """Read every quantized weight, so that what does not fit is found now.

        Raises: FormatError: the first one that does not, or codes that belong to none.
        """
        for name in self._modules:
            self[name]
        for name in self._plain:
            self._need_numbers(name)

    def _need_numbers(self, name: str) -> None:
        """Refuse codes that are no part of a weight here: without scales they are other numbers."""
        kind, convention = str(self._tensors.slice(name).get_dtype()), self._claim.convention
        is_part = kind.startswith(("I", "U")) and name.endswith((*convention.parts, ".weight"))
        if is_part or kind.startswith("F8"):
            needs = f"{name} beside a *{convention.mark}, as {convention.method} stores {self.says}"
            raise mismatch("folder", needs, f"{kind} alone")

    def _not_held(self) -> FormatError:
        claim, names = self._claim, self._tensors.names
        others = [
            other.method for other in CONVENTIONS.values() if any(name.endswith(other.mark) for name in names)
        ]
        needs = f"tensors named *{claim.convention.mark}, as {claim.convention.method} stores {claim.says}"
        got = f"none of {len(names)}" + (f", but such of {' or '.join(others)}" if others else "")
        return mismatch(str(self.folder), needs, got)
