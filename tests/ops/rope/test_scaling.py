"""Rotary tables against the formulas of their papers and against transformers' own."""

import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from layerzero.ops.rope.scaling import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    RopeScaling,
    YarnScaling,
    frequencies,
    rope_tables,
    xpos_table,
)


def test_plain_tables() -> None:
    """Row p, pair i holds the cosine and sine of p * base ** (-2i / R), in float32."""
    cos, sin = rope_tables(8, 5, base=500.0, rotary_dim=4)
    assert cos.shape == sin.shape == (5, 2)
    assert cos.dtype == sin.dtype == torch.float32
    for p in range(5):
        for i in range(2):
            angle = p * 500.0 ** (-2 * i / 4)
            assert float(cos[p, i]) == pytest.approx(math.cos(angle), abs=1e-7)
            assert float(sin[p, i]) == pytest.approx(math.sin(angle), abs=1e-7)


def test_far_positions_keep_their_angle() -> None:
    """At position 100,000 a table is right to float32, where float32 frequencies are not."""
    cos, _ = rope_tables(128, 100_001)
    angle = [100_000 * 10000.0 ** (-2 * i / 128) for i in range(64)]
    expected = torch.tensor([math.cos(a) for a in angle])
    assert_close(cos[-1], expected, atol=1e-6, rtol=0)
    rounded = (100_000 * frequencies(128, 10000.0).float()).cos()
    assert (rounded - expected).abs().max() > 1e-4


def transformers_frequencies(kind: str, parameters: dict[str, Any], seq_len: int | None = None) -> Any:
    """(frequencies, attention factor) as transformers computes them for a Llama of 64-wide heads."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **parameters},
    )
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seq_len)


YARN = {"factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("scaling", "kind", "parameters", "seq_len"),
    [
        (LinearScaling(4.0), "linear", {"factor": 4.0}, None),
        (DynamicNTKScaling(2.0, 2048, 1000), "dynamic", {"factor": 2.0}, 1000),
        (DynamicNTKScaling(2.0, 2048, 8192), "dynamic", {"factor": 2.0}, 8192),
        (YarnScaling(4.0, 2048), "yarn", YARN, None),
        (
            YarnScaling(4.0, 2048, beta_fast=16.0, beta_slow=2.0),
            "yarn",
            YARN | {"beta_fast": 16, "beta_slow": 2},
            None,
        ),
        (YarnScaling(4.0, 2048, attention_factor=1.3), "yarn", YARN | {"attention_factor": 1.3}, None),
        (
            YarnScaling(4.0, 2048, mscale=1.0, mscale_all_dim=0.7),
            "yarn",
            YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
            None,
        ),
        (YarnScaling(4.0, 2048, truncate=False), "yarn", YARN | {"truncate": False}, None),
        (
            Llama3Scaling(8.0, 1.0, 4.0, 1024),
            "llama3",
            {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
            None,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_scalings_equal_transformers(
    scaling: RopeScaling, kind: str, parameters: dict[str, Any], seq_len: int | None
) -> None:
    """Frequencies and the factor on cos and sin are the ones transformers uses."""
    theirs, factor = transformers_frequencies(kind, parameters, seq_len)
    ours, our_factor = scaling.inv_freq(64, 10000.0)
    assert_close(ours, theirs.double(), atol=0, rtol=2e-6)
    assert our_factor == pytest.approx(factor)
    cos, sin = rope_tables(64, 16, scaling=scaling)
    angles = torch.outer(torch.arange(16).double(), ours)
    assert_close(cos, (angles.cos() * our_factor).float())
    assert_close(sin, (angles.sin() * our_factor).float())


def test_ntk_keeps_the_fastest_pair_and_stretches_the_slowest() -> None:
    """The first frequency is unchanged, the last is divided by the factor."""
    plain = frequencies(64, 10000.0)
    ours, factor = NTKScaling(4.0).inv_freq(64, 10000.0)
    assert factor == 1.0
    assert float(ours[0]) == float(plain[0]) == 1.0
    assert float(plain[-1] / ours[-1]) == pytest.approx(4.0)


def test_a_factor_of_one_changes_nothing() -> None:
    """Every scaling by 1 is the plain table."""
    plain = rope_tables(32, 64)
    for scaling in (
        LinearScaling(1.0),
        NTKScaling(1.0),
        DynamicNTKScaling(1.0, 64, 64),
        YarnScaling(1.0, 64),
        Llama3Scaling(1.0),
    ):
        assert_close(rope_tables(32, 64, scaling=scaling), plain)


def test_xpos_table() -> None:
    """Entry (p, i) is ((2i / R + 0.4) / 1.4) ** ((p - middle) / scale_base)."""
    table = xpos_table(8, 7, scale_base=5.0)
    assert table.shape == (7, 4) and table.dtype == torch.float32
    for p in range(7):
        for i in range(4):
            assert float(table[p, i]) == pytest.approx(((2 * i / 8 + 0.4) / 1.4) ** ((p - 3) / 5.0), rel=1e-6)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: rope_tables(7, 4), ValueError, "head_dim needs an even number, got 7"),
        (lambda: rope_tables(0, 4), ValueError, "head_dim needs an int >= 2, got 0"),
        (lambda: rope_tables(8, 0), ValueError, "positions needs an int >= 1, got 0"),
        (
            lambda: rope_tables(8, 4, rotary_dim=10),
            ValueError,
            r"rotary_dim needs an int in \[2, 8\], got 10",
        ),
        (lambda: rope_tables(8, 4, rotary_dim=3), ValueError, "rotary_dim needs an even number, got 3"),
        (lambda: rope_tables(8, 4, base=1.0), ValueError, "base needs a number > 1"),
        (lambda: rope_tables(8, 4, base="x"), TypeError, "base needs a number, got str"),  # type: ignore[arg-type]
        (lambda: rope_tables(8, 4, scaling="yarn"), TypeError, "scaling needs None, LinearScaling"),  # type: ignore[arg-type]
        (lambda: LinearScaling(0.5), ValueError, "factor needs"),
        (lambda: NTKScaling(math.nan), ValueError, "factor needs"),
        (
            lambda: DynamicNTKScaling(2.0, 0, 4),
            ValueError,
            "original_max_position_embeddings needs an int >= 1, got 0",
        ),
        (lambda: DynamicNTKScaling(2.0, 4, 0), ValueError, "seq_len needs an int >= 1, got 0"),
        (
            lambda: YarnScaling(2.0, 64, beta_fast=1.0),
            ValueError,
            "beta_slow needs to be between 0 and beta_fast 1.0",
        ),
        (
            lambda: Llama3Scaling(low_freq_factor=4.0, high_freq_factor=4.0),
            ValueError,
            "low_freq_factor needs to be between 0 and high_freq_factor 4.0",
        ),
        (
            lambda: rope_tables(2, 4, scaling=NTKScaling(2.0)),
            ValueError,
            "NTK scaling needs at least 4 rotated features",
        ),
        (lambda: xpos_table(8, 4, scale_base=0.0), ValueError, "scale_base needs a number > 0"),
        (lambda: xpos_table(8, 4, gamma=0.0), ValueError, "gamma needs a number > 0"),
    ],
)
def test_bad_input_is_named(make: Any, error: type[Exception], message: str) -> None:
    """The error says which argument, what it needs, what it got."""
    with pytest.raises(error, match=message):
        make()
