"""The tensors of a folder of safetensors files, by name, each read when it is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerzero._util.files import read_given
from layerzero.formats.errors import FormatError
from layerzero.spec.reasons import Reason

INDEX = "model.safetensors.index.json"


def mismatch(argument: str, needs: str, got: object) -> FormatError:
    """The error of a folder that is no such checkpoint."""
    return FormatError(argument, needs, got, Reason.CHECKPOINT_FORMAT_MISMATCH)


def read_json(path: Path) -> dict[str, Any]:
    """An object out of a JSON file; an empty one where there is no such file.

    Raises: FormatError: the file holds something else.
    """
    if not path.exists():
        return {}
    try:
        values = json.loads(read_given(path).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise mismatch(path.name, "JSON", error) from error
    if not isinstance(values, dict):
        raise mismatch(path.name, "a JSON object", type(values).__name__)
    return values


class TensorFolder:
    """Names and tensors of `model.safetensors`, or of the files that its index names; nothing is unpickled.

    Raises: FileNotFoundError: there is neither. ModuleNotFoundError: safetensors is not installed.
        FormatError: the index names a file outside of the folder, or tensors that the files do not hold; a
        file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        whole = folder / "model.safetensors"
        if (folder / INDEX).exists():
            named = read_json(folder / INDEX).get("weight_map")
            if not isinstance(named, dict):
                raise mismatch(INDEX, "a weight_map of files by name", type(named).__name__)
            self._file_of = {str(name): _inside(folder, str(file)) for name, file in named.items()}
        elif whole.exists():
            self._file_of = dict.fromkeys(_opened(whole).keys(), whole)
        else:
            raise FileNotFoundError(f"folder needs model.safetensors or {INDEX}, got neither in {folder}")
        self._files = {file: _opened(file) for file in set(self._file_of.values())}
        names_of = {file: frozenset(handle.keys()) for file, handle in self._files.items()}
        missing = [name for name, file in self._file_of.items() if name not in names_of[file]]
        if missing:
            raise mismatch(INDEX, "tensors that its files hold", missing[0])

    @property
    def names(self) -> list[str]:
        """Every tensor's name."""
        return list(self._file_of)

    def files(self) -> dict[str, list[str]]:
        """The names of each file, in order."""
        names_by_file: dict[str, list[str]] = {}
        for name, file in self._file_of.items():
            names_by_file.setdefault(file.name, []).append(name)
        return names_by_file

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def tensor(self, name: str) -> Tensor:
        """A tensor as it is stored.

        Raises: FormatError: there is none of that name.
        """
        tensor: Tensor = self._file(name).get_tensor(name)
        return tensor

    def slice(self, name: str) -> Any:
        """A tensor of which only what is indexed is read, as safetensors gives it.

        Raises: FormatError: there is none of that name.
        """
        return self._file(name).get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        return tuple(self.slice(name).get_shape())

    def _file(self, name: str) -> Any:
        if name not in self._file_of:
            raise mismatch(str(self.path), f"the tensor {name}", "none")
        return self._files[self._file_of[name]]


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    if path.exists() and not path.is_file():
        raise mismatch(path.name, "a file of safetensors", "no plain file")
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except SafetensorError as error:
        raise mismatch(path.name, "a file of safetensors", error) from error


def _inside(folder: Path, file: str) -> Path:
    if Path(file).name != file or not file.endswith(".safetensors"):
        raise mismatch(INDEX, "files of its folder that end with .safetensors", repr(file))
    return folder / file


def on_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """`tensor` there, dense."""
    return tensor.to(device).contiguous()
