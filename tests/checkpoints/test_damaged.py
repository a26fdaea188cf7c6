"""Folders that lack a part, or hold another one, are refused where they would be read as other numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.formats import QuantizedTensor
from layerzero.spec.reasons import Reason
from tests.checkpoints.test_readers import read
from tests.checkpoints.writers import NAME, WRITERS, int32_of, save, weight

Damage = Callable[[dict[str, Tensor], dict[str, Any]], object]
ABSMAX = f"{NAME}.weight.absmax"
NESTED = f"{NAME}.weight.nested_absmax"


@pytest.mark.parametrize(
    ("kind", "damage", "needs"),
    [
        ("awq", lambda parts, _: parts.pop(f"{NAME}.qzeros"), "qzeros"),
        ("gptq_v2", lambda _, says: says.update(checkpoint_format="gptq_v3"), "checkpoint_format gptq or"),
        ("gptq_v2", lambda _, says: says.update(checkpoint_format=2), "checkpoint_format gptq or"),
        ("nf4", lambda parts, _: parts.update({NESTED: parts[NESTED][None]}), "nested_absmax of shape"),
        ("nf4", lambda parts, _: parts.update({ABSMAX: parts[ABSMAX].bool()}), "absmax of uint8"),
        (
            "nf4 in one level",
            lambda parts, _: parts.update({ABSMAX: parts[ABSMAX].bool()}),
            "absmax of float",
        ),
        ("nf4", lambda parts, _: parts.update({ABSMAX: parts[ABSMAX].view(2, -1)}), "absmax of shape"),
    ],
)
def test_what_would_be_other_numbers_is_refused(
    kind: str, damage: Damage, needs: str, tmp_path: Path
) -> None:
    """By the part's name, and what its convention stores there."""
    parts, says, _ = WRITERS[kind]()
    damage(parts, says)
    with pytest.raises(lz.FormatError, match=needs):
        read(save(tmp_path, parts, says))


def test_codes_around_eight_need_no_zero_points(tmp_path: Path) -> None:
    """Where AWQ's folder says that there are none."""
    parts, says, _ = WRITERS["awq"]()
    del parts[f"{NAME}.qzeros"]
    weight = read(save(tmp_path, parts, says | {"zero_point": False}))
    assert weight.zero_point is None and torch.isfinite(weight.dequantize()).all()


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        ("awq", ".qweight"), ("gptq", ".qweight"), ("nf4", ".weight.quant_state.bitsandbytes__nf4"),
        ("mxfp4", "_blocks"), ("nvfp4", ".weight_scale"), ("modelopt fp8", ".weight_scale"),
        ("fp8 by block", ".weight_scale_inv"),
    ],
)  # fmt: skip
def test_codes_without_their_scales_are_no_plain_weight(kind: str, lost: str, tmp_path: Path) -> None:
    """Beside a whole layer: by name, when the weight or whatever is left of it is asked for, and by check."""
    parts, says, _ = WRITERS[kind]()
    second = {name.replace("layers.0", "layers.1"): part.clone() for name, part in parts.items()}
    rest = {name: part for name, part in second.items() if not name.endswith(lost)}
    checkpoint = lz.load_quantized(save(tmp_path, parts | rest, says))
    codes = [name for name in checkpoint if name in rest and not rest[name].dtype.is_floating_point]
    codes += [name for name in checkpoint if name in rest and rest[name].dtype == torch.float8_e4m3fn]
    assert codes
    asks: list[Callable[[], object]] = [checkpoint.check]
    asks += [partial(checkpoint.dequantized, name) for name in codes]
    for ask in asks:
        with pytest.raises(lz.FormatError, match=r"layers\.1.* beside .*, got .* alone") as caught:
            ask()
        assert caught.value.reason is Reason.CHECKPOINT_FORMAT_MISMATCH


def test_codes_of_another_library_are_no_plain_weight(tmp_path: Path) -> None:
    """float8 by any name, as experts in one tensor have it; whole numbers that are no codes are left."""
    parts, says, _ = WRITERS["fp8 by block"]()
    others = {
        "model.experts.down_proj": torch.ones(2, 4, 4).to(torch.float8_e4m3fn),
        "model.other.weight": torch.ones(4, 4, dtype=torch.int8),
        "model.position_ids": torch.arange(4),
        "model.norm.weight": torch.ones(()),
    }
    checkpoint = lz.load_quantized(save(tmp_path, parts | others, says))
    assert torch.equal(checkpoint.dequantized("model.position_ids"), torch.arange(4.0))
    for name in list(others)[:2]:
        with pytest.raises(lz.FormatError, match=name):
            checkpoint.dequantized(name)


def test_an_order_that_is_claimed_is_held(tmp_path: Path) -> None:
    """`desc_act` without the order: rows of other groups would be read with these scales."""
    parts, says, numbers = WRITERS["gptq"]()
    del parts[f"{NAME}.g_idx"]
    torch.testing.assert_close(read(save(tmp_path, parts, says)).dequantize(), numbers)
    with pytest.raises(lz.FormatError, match="g_idx"):
        read(save(tmp_path, parts, says | {"desc_act": True}))


CHANNEL: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True}


def claimed(layout: str, **weights: Any) -> dict[str, Any]:
    """compressed-tensors' configuration of one group of weights, beside one that has none."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}, "group_1": {"weights": None}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


def packed(made: QuantizedTensor, width: int | None = None) -> dict[str, Tensor]:
    """Four-bit codes as compressed-tensors packs them."""
    shape = torch.tensor([made.shape[0], width or made.shape[1]])
    return {
        f"{NAME}.weight_packed": made.codes.view(torch.int32), f"{NAME}.weight_scale": made.scale,
        f"{NAME}.weight_shape": shape,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("weights", "needs"),
    [
        ({**CHANNEL, "num_bits": 3}, "codes of 3 bits"),
        ({**CHANNEL, "symmetric": False}, "weight_zero_point"),
        ({**CHANNEL, "strategy": "group", "group_size": 128}, "groups of 128"),
        ({**CHANNEL, "strategy": "group", "group_size": 96, "actorder": "group"}, "weight_g_idx"),
    ],
)
def test_codes_that_are_claimed_are_held(weights: dict[str, Any], needs: str, tmp_path: Path) -> None:
    """Bits, zero points and groups: scales of 192 numbers by 128 are two, and no two groups of 96."""
    made = QuantizedTensor.quantize(weight(width=192), "int4", group_size=96)
    held = {**CHANNEL, "strategy": "group", "group_size": 96}
    assert torch.equal(
        read(save(tmp_path, packed(made), claimed("pack-quantized", **held))).dequantize(), made.dequantize()
    )
    with pytest.raises(lz.FormatError, match=needs) as caught:
        read(save(tmp_path, packed(made), claimed("pack-quantized", **weights)))
    assert caught.value.reason is Reason.CHECKPOINT_FORMAT_MISMATCH


def test_a_column_too_few_for_whole_bytes_is_not_dropped(tmp_path: Path) -> None:
    """Of 127 columns 126 came back."""
    made = QuantizedTensor.quantize(weight(), "int4", granularity="row")
    with pytest.raises(lz.FormatError, match="even"):
        read(save(tmp_path, packed(made, 127), claimed("pack-quantized", **CHANNEL)))


@pytest.mark.parametrize("shape", [(256, 128), (256, 100), (1, 200), (128, 128), (40, 300)])
def test_blocks_of_any_shape_of_weight_are_read(shape: tuple[int, int], tmp_path: Path) -> None:
    """Also where one block is as wide as the weight, or a weight has one row."""
    made = QuantizedTensor.quantize(weight(*shape), "fp8_e4m3", granularity="block", group_size=128)
    block = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    parts = {f"{NAME}.weight": made.codes, f"{NAME}.weight_scale": made.scale}
    found = read(save(tmp_path, parts, claimed("float-quantized", **block)))
    assert torch.equal(found.dequantize(), made.dequantize())


@pytest.mark.parametrize(("form", "layout"), [("int8", "int-quantized"), ("fp8_e4m3", "float-quantized")])
def test_eight_bits_by_group_are_read(form: str, layout: str, tmp_path: Path) -> None:
    """As compressed-tensors' strategy group stores them, under the weight's own name."""
    made = QuantizedTensor.quantize(weight(), form, granularity="group", group_size=64)
    group = {"num_bits": 8, "type": layout.split("-")[0], "strategy": "group", "group_size": 64}
    parts = {f"{NAME}.weight": made.codes, f"{NAME}.weight_scale": made.scale}
    found = read(save(tmp_path, parts, claimed(layout, **group)))
    assert torch.equal(found.dequantize(), made.dequantize())


@pytest.mark.parametrize("device", ["nowhere", torch.float16, 1.5])
def test_a_device_that_is_none_is_named(device: Any, tmp_path: Path) -> None:
    """Before a tensor is read; a dtype would make other numbers of the codes."""
    folder = save(tmp_path, *WRITERS["awq"]()[:2])
    with pytest.raises((TypeError, ValueError), match="device needs"):
        lz.load_quantized(folder, device=device)
    with pytest.raises((TypeError, ValueError), match="device needs"):
        read(folder).to(device)


@pytest.mark.parametrize("folder", [None, 3, b"folder"])
def test_a_folder_that_is_no_path_is_named(folder: Any) -> None:
    """By the argument's name."""
    with pytest.raises(TypeError, match="folder needs a path"):
        lz.load_quantized(folder)


def test_the_largest_zero_point_is_fifteen(tmp_path: Path) -> None:
    """GPTQ stores them less one: of 14 it is read, of 15 refused by the tensor's name."""
    tensors, said, _ = WRITERS["gptq"]()
    zeros, exact = f"{NAME}.qzeros", read(save(tmp_path, tensors, said))
    tensors[zeros] = int32_of(torch.full((4, 2, 8), 14))
    found = read(save(tmp_path, tensors, said))
    wanted = exact.dequantize() - 7 * exact.scale.float().repeat_interleave(32, 1)
    torch.testing.assert_close(found.dequantize(), wanted)
    tensors[zeros] = int32_of(torch.full((4, 2, 8), 15))
    with pytest.raises(lz.FormatError, match=rf"{zeros} needs zero points of 0 to 15, got 16") as refused:
        read(save(tmp_path, tensors, said))
    assert refused.value.reason == Reason.ZERO_POINT_MISMATCH


def test_a_size_that_is_claimed_makes_no_numbers(tmp_path: Path) -> None:
    """A file of a few bytes that says a width of a trillion is refused before an order of it is made."""
    parts = {
        f"{NAME}.weight_packed": torch.zeros(16, 16, dtype=torch.int32),
        f"{NAME}.weight_scale": torch.ones(16, 4), f"{NAME}.weight_shape": torch.tensor([16, 1 << 40]),
        f"{NAME}.weight_g_idx": torch.zeros(128, dtype=torch.int32),
    }  # fmt: skip
    said = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    with pytest.raises(lz.FormatError, match=r"weight_g_idx of shape \(1099511627776,\), .*got \(128,\)"):
        read(save(tmp_path, parts, said))
