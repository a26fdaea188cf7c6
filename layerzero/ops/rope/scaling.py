"""Tables of rotary angles, plain and for contexts longer than a model was trained on.

Angles are computed in float64 and stored in float32: a float32 frequency is off by a hundredth of a radian
at position 100,000.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from layerzero.ops import checks


class RopeScaling(Protocol):
    """A way to stretch the angles."""

    def inv_freq(self, width: int, base: float) -> tuple[Tensor, float]:
        """(float64 frequencies of `width // 2` pairs, factor on cos and sin)."""
        ...


def frequencies(width: int, base: float) -> Tensor:
    """base ** (-2i / width) for i in [0, width / 2), float64. Source: arXiv 2104.09864."""
    return base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)


@dataclass(frozen=True, slots=True)
class _Stretched:
    factor: float

    def __post_init__(self) -> None:
        checks.need_number("factor", self.factor, low=1.0)
        for name in ("original_max_position_embeddings", "seq_len"):
            if hasattr(self, name):
                checks.need_int(name, getattr(self, name), low=1)


@dataclass(frozen=True, slots=True)
class LinearScaling(_Stretched):
    """Positions divided by `factor`. Source: arXiv 2306.15595."""

    def inv_freq(self, width: int, base: float) -> tuple[Tensor, float]:
        return frequencies(width, base) / self.factor, 1.0


@dataclass(frozen=True, slots=True)
class NTKScaling(_Stretched):
    """A larger base, so that the slowest pair turns `factor` times slower and the fastest as before."""

    def inv_freq(self, width: int, base: float) -> tuple[Tensor, float]:
        return frequencies(width, _ntk_base(width, base, self.factor)), 1.0


@dataclass(frozen=True, slots=True)
class DynamicNTKScaling(_Stretched):
    """NTK whose base grows with the sequence, `seq_len`, beyond `original_max_position_embeddings`."""

    original_max_position_embeddings: int
    seq_len: int

    def inv_freq(self, width: int, base: float) -> tuple[Tensor, float]:
        length = max(self.seq_len, self.original_max_position_embeddings)
        factor = self.factor * length / self.original_max_position_embeddings - self.factor + 1
        return frequencies(width, _ntk_base(width, base, factor)), 1.0


def _ntk_base(width: int, base: float, factor: float) -> float:
    if width <= 2:
        raise ValueError(f"NTK scaling needs at least 4 rotated features, got {width}")
    return float(base * factor ** (width / (width - 2)))


@dataclass(frozen=True, slots=True)
class YarnScaling(_Stretched):
    """Fast pairs as they are, slow ones `factor` times slower, a ramp between. Source: arXiv 2309.00071.

    A pair is fast if it turns more than `beta_fast` times within the `original_max_position_embeddings`, slow
    below `beta_slow`. `attention_factor` multiplies cos and sin; None takes the paper's 0.1 ln(factor) + 1,
    or the ratio of two such terms where both `mscale`s are given. `truncate` rounds the ramp's ends outwards.
    """

    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _Stretched.__post_init__(self)  # `super()` would look for the class before it got its slots
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                f"beta_slow needs to be between 0 and beta_fast {self.beta_fast}, got {self.beta_slow}"
            )

    def inv_freq(self, width: int, base: float) -> tuple[Tensor, float]:
        low, high = self._pair(self.beta_fast, width, base), self._pair(self.beta_slow, width, base)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        # A ramp of no width would divide by zero; a thousandth of a pair is a step.
        span = high - low or 1e-3
        ramp = ((torch.arange(width // 2, dtype=torch.float64) - low) / span).clamp(0, 1)
        plain = frequencies(width, base)
        return plain * (1 - ramp) + plain / self.factor * ramp, self._attention_factor()

    def _pair(self, turns: float, width: int, base: float) -> float:
        """The (fractional) pair that turns `turns` times within the trained length."""
        wavelength = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return width * math.log(wavelength) / (2 * math.log(base))

    def _attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    def _temperature(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0


@dataclass(frozen=True, slots=True)
class Llama3Scaling(_Stretched):
    """Long wavelengths stretched by `factor`, short ones kept, blended between, as Llama 3.1 does.

    A wavelength is long above original_max_position_embeddings / low_freq_factor, short below it /
    high_freq_factor.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        _Stretched.__post_init__(self)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor needs to be between 0 and high_freq_factor {self.high_freq_factor}, "
                f"got {self.low_freq_factor}"
            )

    def inv_freq(self, width: int, base: float) -> tuple[Tensor, float]:
        plain = frequencies(width, base)
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)
        unscaled_share = (
            (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        ).clamp(0, 1)
        return plain * unscaled_share + plain / self.factor * (1 - unscaled_share), 1.0


def rope_tables(
    head_dim: int,
    positions: int,
    *,
    base: float = 10000.0,
    rotary_dim: int | None = None,
    scaling: RopeScaling | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """(cos, sin), each (positions, R / 2) float32, for heads of `head_dim` of which R features turn.

    Args: R is `rotary_dim`, or the whole head; `scaling` is None or a `LinearScaling`, `NTKScaling`,
        `DynamicNTKScaling`, `YarnScaling` or `Llama3Scaling`.
    Raises: ValueError, TypeError: an argument does not fit, by name.

    Example:
        >>> import layerzero as lz
        >>> cos, sin = lz.rope_tables(64, 128, scaling=lz.LinearScaling(2.0))
        >>> cos.shape
        torch.Size([128, 32])
    """
    width = _rotated(head_dim, rotary_dim)
    checks.need_int("positions", positions, low=1)
    checks.need_number("base", base, above=1.0)
    if scaling is not None and not hasattr(scaling, "inv_freq"):
        raise TypeError(
            "scaling needs None, LinearScaling, NTKScaling, DynamicNTKScaling, YarnScaling or Llama3Scaling, "
            f"got {type(scaling).__name__}"
        )
    # Tables that count versions, also when made in inference mode: kernels keep what they make of them.
    with torch.inference_mode(False), torch.no_grad():
        speeds, factor = (frequencies(width, base), 1.0) if scaling is None else scaling.inv_freq(width, base)
        angles = torch.outer(torch.arange(positions, dtype=torch.float64), speeds)
        cos, sin = (angles.cos() * factor).float(), (angles.sin() * factor).float()
        return cos.to(device), sin.to(device)


def xpos_table(
    head_dim: int,
    positions: int,
    *,
    rotary_dim: int | None = None,
    scale_base: float = 512.0,
    gamma: float = 0.4,
    device: torch.device | str | None = None,
) -> Tensor:
    """XPos factors (positions, R / 2) float32: zeta ** ((position - positions // 2) / scale_base).

    zeta of pair i is (2i / R + gamma) / (1 + gamma). Positions count from the middle, so that neither end
    leaves float32; only differences of positions matter.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 2212.10554, section 3.
    """
    width = _rotated(head_dim, rotary_dim)
    checks.need_int("positions", positions, low=1)
    checks.need_number("scale_base", scale_base, above=0.0)
    checks.need_number("gamma", gamma, above=0.0)
    pairs = torch.arange(0, width, 2, dtype=torch.float64) / width
    zeta = (pairs + gamma) / (1 + gamma)
    power = (torch.arange(positions, dtype=torch.float64) - positions // 2) / scale_base
    return (zeta ** power[:, None]).float().to(device)


def _rotated(head_dim: int, rotary_dim: int | None) -> int:
    sizes = {"head_dim": head_dim, "rotary_dim": head_dim if rotary_dim is None else rotary_dim}
    for name, size in sizes.items():
        checks.need_int(name, size, low=2, high=None if name == "head_dim" else head_dim)
        if size % 2:
            raise ValueError(f"{name} needs an even number, got {size}")
    return sizes["rotary_dim"]
