"""Conversions say what they cost and come back to what they were."""

import pytest
import torch

from layerzero.formats.errors import FormatError
from layerzero.kvcache import conversion, convert
from layerzero.spec.hardware import Hardware

FAST = Hardware(platform="cpu", device="cpu", name="x", vendor="x", bandwidth=1e9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_round_trip_through_the_other_layout_is_exact(dtype: torch.dtype) -> None:
    """NHD to HND and back gives the same pool, dense each time."""
    pool = torch.randn(3, 4, 2, 8).to(dtype)
    turned = convert(pool, "NHD", to_layout="HND")
    assert turned.shape == (3, 2, 4, 8) and turned.is_contiguous()
    assert torch.equal(convert(turned, "HND", to_layout="NHD"), pool)


def test_nothing_to_do_costs_nothing_and_copies_nothing() -> None:
    """The same layout and dtype give the pool itself."""
    pool = torch.zeros(3, 4, 2, 8)
    price = conversion(pool, "NHD", hardware=FAST)
    assert not price.needed and price.bytes == 0 and price.expected_us == 0
    assert convert(pool, "NHD") is pool


def test_the_price_counts_what_is_read_and_written() -> None:
    """Float32 to bfloat16: four bytes read, two written an element, and digits are lost."""
    pool = torch.zeros(3, 4, 2, 8)
    price = conversion(pool, "NHD", to_layout="HND", to_dtype=torch.bfloat16, hardware=FAST)
    assert price.bytes == 192 * 6 and price.expected_us == pytest.approx(192 * 6 / 1e9 * 1e6)
    assert price.layout == ("NHD", "HND") and price.dtype == ("float32", "bfloat16")
    assert price.needed and not price.exact
    back = conversion(pool.bfloat16(), "NHD", to_dtype=torch.float32, hardware=FAST)
    assert back.exact
    assert convert(pool, "NHD", to_dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_target_that_is_no_float_is_refused() -> None:
    """Quantised caches need scales, which a cast has not."""
    with pytest.raises(TypeError, match="to_dtype needs a floating point dtype, got int8"):
        conversion(torch.zeros(1, 1, 1, 1), "NHD", to_dtype=torch.int8, hardware=FAST)
    numbers = torch.zeros(1, 2, 3, 4)
    codes = numbers.to(torch.float8_e4m3fn)
    for pool, dtype in ((numbers, torch.float8_e4m3fn), (codes, torch.float32), (codes, torch.float8_e5m2)):
        with pytest.raises(FormatError, match="like pool, for codes need a scale"):
            convert(pool, "NHD", to_dtype=dtype)
    assert convert(codes, "NHD", to_layout="HND").shape == (1, 3, 2, 4)
