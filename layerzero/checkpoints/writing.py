"""A model's folder with its weights rounded, written as compressed-tensors does; all of it or nothing."""

from __future__ import annotations

import fnmatch
import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from torch import Tensor

from layerzero.checkpoints.folder import INDEX, TensorFolder, mismatch, read_json
from layerzero.checkpoints.rounding import LayerError, error_of, method_of
from layerzero.formats import FORMATS, QuantizedTensor
from layerzero.formats.errors import FormatError
from layerzero.spec.reasons import Reason

# What is no weight of a product, by its name; vectors are left alone anyhow.
LEFT_ALONE = ("*embed*", "lm_head.*", "*norm*", "*.gate.weight", "*router*")
# compressed-tensors' name for each format, and how it describes its weights.
LAYOUTS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "int4": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group"}),
        "int8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
        "fp8_e4m3": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        "nvfp4": (
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        ),
        "mxfp4": (
            "mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
        ),
    }
)  # fmt: skip
_OTHERS = (".json", ".jinja", ".txt", ".model")
Progress = Callable[[int, int, str], None]


class QuantizeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was written: bytes of all weights before and after, and the error of each rounded one."""

    folder: str
    format: str
    method: str
    calibration_tokens: int
    bytes_before: int
    bytes_after: int
    layers: tuple[LayerError, ...]


def weights_to_round(tensors: TensorFolder, ignore: Sequence[str]) -> list[str]:
    """The names of matrices that multiply rows, in the folder's order."""
    return [
        name
        for name in tensors.names
        if name.endswith(".weight")
        and len(tensors.shape(name)) == 2
        and not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore)
    ]


def quantize_folder(
    source: Path,
    target: Path,
    form: str,
    *,
    method: str = "nearest",
    group_size: int | None = None,
    ignore: Sequence[str] = LEFT_ALONE,
    grams: Mapping[str, Tensor] | None = None,
    tokens: int = 0,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Write `source`'s model into the new folder `target` with its matrices rounded to `form`.

    Args: grams are X'X (K, K) by the weight's name, of the rows X that it multiplied while `tokens` tokens
        ran; they judge, and gptq rounds by them. ignore are patterns of names that stay as they are.
    Raises: FormatError: the format cannot be written, does not fit a weight, a weight is not finite, or the
        source is quantized already. FileExistsError: target is there. FileNotFoundError: source lacks a file.
        Nothing is left of target then.
    """
    sums = grams or {}
    config, tensors = open_plain(source, target, form, method, bool(sums))
    rounder = method_of(method, form, bool(sums))
    chosen = dict.fromkeys(weights_to_round(tensors, ignore))
    size = _group_of(form, group_size, {tensors.shape(name)[1] for name in chosen})
    layers: list[LayerError] = []
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        place: dict[str, str] = {}
        for file, names in tensors.files().items():
            written: dict[str, Tensor] = {}
            for name in names:
                weight = tensors.tensor(name)
                if name not in chosen:
                    written[name] = weight
                    continue
                rounded = rounder.round(weight.float(), form, size, sums.get(name))
                layers.append(error_of(name, weight, rounded, sums.get(name)))
                written |= _stored(name.removesuffix(".weight"), rounded)
                if progress is not None:
                    progress(len(layers), len(chosen), name)
            _save(written, partial / file)
            place |= dict.fromkeys(written, file)
        if (source / INDEX).exists():  # of a single file, too: its name is another
            (partial / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": place}), encoding="utf-8")
        described = _described(form, size, chosen, tensors)
        text = json.dumps(config | {"quantization_config": described}, indent=2)
        (partial / "config.json").write_text(text, encoding="utf-8")
        _copy_others(source, partial)
        partial.chmod(0o755)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return QuantizeReport(
        folder=str(target), format=form, method=method, calibration_tokens=tokens,
        bytes_before=_bytes(source), bytes_after=_bytes(target), layers=tuple(layers),
    )  # fmt: skip


def open_plain(
    source: Path, target: Path, form: str, method: str, calibrated: bool
) -> tuple[dict[str, Any], TensorFolder]:
    """The configuration and the tensors of a model that may be rounded to `form` and written to `target`.

    `calibrated` says whether a text runs, or has run, through it.

    Raises: see `quantize_folder`; no weight is read.
    """
    if form not in LAYOUTS:
        needs = f"one of {', '.join(LAYOUTS)}, which compressed-tensors stores"
        raise FormatError("format", needs, repr(form), Reason.QUANT_FORMAT_UNSUPPORTED)
    method_of(method, form, calibrated)
    if target.exists() or target.is_symlink():
        raise FileExistsError(f"target needs to be a new folder, {target} exists")
    if not (source / "config.json").exists():
        raise FileNotFoundError(f"folder needs config.json, got none in {source}")
    config = read_json(source / "config.json")
    if "quantization_config" in config or (source / "hf_quant_config.json").exists():
        raise mismatch(str(source), "weights that are not quantized yet", "a quantization_config")
    return config, TensorFolder(source)


def _group_of(form: str, group_size: int | None, widths: Collection[int]) -> int | None:
    """The group of the format, where it has one that may be chosen: as asked, else the largest that fits."""
    if form != "int4":
        if group_size is not None:
            needs = f"None for {form}, whose scales are shared as it says"
            raise FormatError("group_size", needs, group_size, Reason.QUANT_GROUP_UNSUPPORTED)
        return None
    if not widths:
        raise mismatch("folder", "a matrix to round", "none")
    if group_size is None:
        sizes = [size for size in FORMATS[form].group_sizes if not any(width % size for width in widths)]
        group_size = max(sizes, default=FORMATS[form].group_sizes[0])
    for width in widths:
        FORMATS[form].need_group(width, group_size, "a weight")
    return group_size


def _stored(module: str, quantized: QuantizedTensor) -> dict[str, Tensor]:
    """The tensors of a weight as compressed-tensors names them."""
    codes, scale = quantized.codes.contiguous(), quantized.scale
    parts = {"weight_packed" if quantized.form.packed > 1 else "weight": codes, "weight_scale": scale}
    if quantized.format == "int4":
        if quantized.shape[1] % 8:
            needs = "rows of a multiple of 8 numbers, which fill an int32"
            raise FormatError(module, needs, quantized.shape[1], Reason.PACKED_LAYOUT_MISMATCH)
        shape = torch.tensor(quantized.shape, device="cpu")
        parts |= {"weight_packed": codes.view(torch.int32), "weight_shape": shape}
    if quantized.tensor_scale is not None:
        parts["weight_global_scale"] = (1.0 / quantized.tensor_scale).reshape(1)
    if quantized.format == "mxfp4":
        parts["weight_scale"] = scale.view(torch.uint8)
    return {f"{module}.{name}": part for name, part in parts.items()}


def _described(form: str, size: int | None, chosen: Collection[str], tensors: TensorFolder) -> dict[str, Any]:
    """The quantization_config that compressed-tensors reads."""
    layout, weights = LAYOUTS[form]
    weights = {**weights, "symmetric": True, "dynamic": False} | ({"group_size": size} if size else {})
    matrices = weights_to_round(tensors, ())
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"], "weights": weights, "input_activations": None,
                "output_activations": None, "format": layout,
            }
        },
        "ignore": sorted(
            {"lm_head", *(name.removesuffix(".weight") for name in matrices if name not in chosen)}
        ),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }  # fmt: skip


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"}
    )


def _copy_others(source: Path, target: Path) -> None:
    """Tokenizer, generation settings and texts: every file of these kinds that is not written yet."""
    for path in sorted(source.iterdir()):
        copied = path.suffix in _OTHERS and path.name != INDEX and not (target / path.name).exists()
        if copied and path.is_file():
            shutil.copyfile(path, target / path.name)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
