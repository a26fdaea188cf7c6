"""A weight rounded to a format by one of the methods, and what that costs it and its outputs."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec
import torch
from torch import Tensor

from layerzero.checkpoints.gptq import gptq
from layerzero.formats import QuantizedTensor, pack_pairs
from layerzero.formats.errors import FormatError
from layerzero.spec.errors import BackendNotAvailableError
from layerzero.spec.reasons import Reason

HQQ_FORMATS = ("int4", "int8")


class LayerError(msgspec.Struct, frozen=True, kw_only=True):
    """What rounding costs one weight: relative errors in the Frobenius norm.

    `weight` is |W - Q| / |W|; `output` is |X (W - Q)'| / |X W'| over the calibration's rows X, None without.
    """

    name: str
    format: str
    bits: float
    weight: float
    output: float | None


@dataclass(frozen=True)
class Method:
    """How numbers become codes: `round(weight, format, group size, gram)`; `formats` empty for all.

    `gram` (K, K), float64, is X'X of the rows X that the weight multiplied, None without; `calibrated` says
    that the method is none without a text.
    """

    name: str
    round: Callable[[Tensor, str, int | None, Tensor | None], QuantizedTensor]
    formats: tuple[str, ...] = ()
    distribution: str = ""
    calibrated: bool = False


def _nearest(weight: Tensor, form: str, group_size: int | None, _: Tensor | None) -> QuantizedTensor:
    return QuantizedTensor.quantize(weight, form, group_size=group_size)


def _gptq(weight: Tensor, form: str, group_size: int | None, gram: Tensor | None) -> QuantizedTensor:
    """GPTQ; to the nearest where the text reached no such weight, as an expert that no token chose."""
    if gram is None:
        return _nearest(weight, form, group_size, None)
    return gptq(weight, form, group_size, gram)


def _hqq(weight: Tensor, form: str, group_size: int | None, _: Tensor | None) -> QuantizedTensor:
    """torchao's half-quadratic rounding: scales that minimize the error of what they give back."""
    primitives = importlib.import_module("torchao.quantization.quant_primitives")
    usual = 128 if form == "int4" else weight.shape[1]
    size = min(group_size or usual, weight.shape[1])
    low, high = (-8, 7) if form == "int4" else (-127, 127)
    codes, scale = primitives._choose_qparams_and_quantize_scale_only_hqq(
        weight.float(), [1, size], low, high
    )
    stored = pack_pairs((codes + 8).to(torch.uint8)) if form == "int4" else codes.to(torch.int8)
    return QuantizedTensor(stored, scale.float(), form)


_METHODS = (
    Method("nearest", _nearest),
    Method("hqq", _hqq, HQQ_FORMATS, "torchao"),
    Method("gptq", _gptq, calibrated=True),
)
METHODS: Mapping[str, Method] = MappingProxyType({method.name: method for method in _METHODS})


def method_of(name: str, form: str, calibrated: bool) -> Method:
    """The method of that name, for a format; `calibrated` says whether a text runs through the model.

    Raises: ValueError: there is none, or it needs a text. FormatError: it does not round to that format.
        BackendNotAvailableError: its library is not installed.
    """
    if name not in METHODS:
        raise ValueError(f"method needs one of {', '.join(METHODS)}, got {name!r}")
    method = METHODS[name]
    if method.formats and form not in method.formats:
        needs = f"one of {', '.join(method.formats)} for method {name}"
        raise FormatError("format", needs, form, Reason.QUANT_FORMAT_UNSUPPORTED)
    if method.calibrated and not calibrated:
        raise ValueError(f"method {name} needs calibrate, a text that runs through the model, got none")
    if method.distribution and importlib.util.find_spec(method.distribution) is None:
        raise missing_library(f"method {name}", method.distribution)
    return method


def missing_library(what: str, library: str) -> BackendNotAvailableError:
    """The error of `what`, which a library would do that is not installed."""
    message = f"{what} needs {library}, which is not installed: pip install {library}"
    return BackendNotAvailableError(message, backend=library, reason=Reason.BACKEND_MISSING)


def error_of(name: str, weight: Tensor, quantized: QuantizedTensor, gram: Tensor | None) -> LayerError:
    """The errors of a rounded weight (C, K); `gram` (K, K), float64, is X'X of the rows X it multiplied."""
    exact = weight.double()
    off = exact - quantized.dequantize(torch.float64)
    output = None
    if gram is not None:
        wrong, right = ((part @ gram * part).sum().clamp_min(0) for part in (off, exact))
        output = float((wrong / right).sqrt()) if float(right) else 0.0
    return LayerError(
        name=name,
        format=quantized.format,
        bits=round(8.0 * quantized.nbytes / weight.numel(), 3),
        weight=float(off.norm() / exact.norm()) if float(exact.norm()) else 0.0,
        output=output,
    )
