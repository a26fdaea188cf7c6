"""Folders of every convention are read to the number, and what they do not hold is named."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import layerzero as lz
from layerzero.checkpoints.folder import TensorFolder
from layerzero.formats import QuantizedTensor
from layerzero.formats.errors import FormatError
from layerzero.spec.reasons import Reason
from tests.checkpoints import writers
from tests.checkpoints.writers import NAME, WRITERS, save, weight


def read(folder: Path) -> QuantizedTensor:
    """The only quantized weight of a folder."""
    checkpoint = lz.load_quantized(folder)
    (name,) = checkpoint.quantized
    found = checkpoint[name]
    assert isinstance(found, QuantizedTensor) and list(checkpoint) == [name]
    return found


@pytest.mark.parametrize("kind", WRITERS)
def test_weights_are_the_numbers_that_the_layout_stands_for(kind: str, tmp_path: Path) -> None:
    """To the last bit of float32; no part is left over beside the weight."""
    tensors, said, numbers = WRITERS[kind]()
    found = read(save(tmp_path, tensors, said))
    torch.testing.assert_close(found.dequantize(), numbers, rtol=2e-7, atol=0)


@pytest.mark.parametrize("kind", ["awq", "gptq", "nf4", "nvfp4", "fp8 by block"])
def test_a_product_runs_on_what_was_read(kind: str, tmp_path: Path) -> None:
    """`quantized_linear` takes a weight as it comes out of the folder."""
    tensors, said, numbers = WRITERS[kind]()
    found = read(save(tmp_path, tensors, said))
    x = torch.randn(3, numbers.shape[1])
    out = lz.sync.quantized_linear(x, **found.arguments())
    torch.testing.assert_close(out, x @ numbers.T, rtol=1e-4, atol=1e-4)


# -- compressed-tensors writes its own --------------------------------------------------------------------


def scheme(**weights: Any) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


def compressed(layout: str, made: Any, parts: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """What compressed-tensors stores of a weight, and what it reads back."""
    from compressed_tensors.compressors import BaseCompressor

    compressor = BaseCompressor.load_from_registry(layout)
    state = compressor.compress({"weight": weight(), **parts}, made)
    plain = compressor.decompress(dict(state), made)["weight"]
    return {f"{NAME}.{name}": tensor for name, tensor in state.items() if tensor is not None}, plain.float()  # pyright: ignore[reportOptionalMemberAccess]


CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "int4 by group": (
        "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, "int4"
    ),
    "int4 with zero points": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}, "int4",
    ),
    "int8 packed": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, "int8"),
    "int8 by channel": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, "int8"),
    "float8 by channel": (
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, "fp8_e4m3"
    ),
    "float8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, "fp8_e4m3"),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, "nvfp4",
    ),
}  # fmt: skip


def scales_of(form: str, args: dict[str, Any]) -> dict[str, Tensor]:
    """Scales, and zero points, of `weight()` as compressed-tensors wants them."""
    if form == "nvfp4":
        made = QuantizedTensor.quantize(weight(), "nvfp4")
        assert made.tensor_scale is not None
        return {
            "weight_scale": made.scale.float(), "weight_global_scale": (1.0 / made.tensor_scale).view(1),
        }  # fmt: skip
    if args["strategy"] == "group":
        symmetric = args.get("symmetric", True)
        made = QuantizedTensor.quantize(weight(), "int4", group_size=32, symmetric=symmetric)
        zero = torch.zeros_like(made.scale) if made.zero_point is None else made.zero_point.float() - 8
        return {"weight_scale": made.scale, "weight_zero_point": zero.to(torch.int8)}
    granularity = "row" if args["strategy"] == "channel" else "tensor"
    return {"weight_scale": QuantizedTensor.quantize(weight(), form, granularity=granularity).scale}


@pytest.mark.parametrize("case", CASES)
def test_what_compressed_tensors_writes_is_read_as_it_reads_it(case: str, tmp_path: Path) -> None:
    """The library's own compressor and decompressor, format by format."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    layout, args, form = CASES[case]
    tensors, plain = compressed(layout, scheme(**args), scales_of(form, args))
    said = {"quant_method": "compressed-tensors", "format": layout}
    found = read(save(tmp_path, tensors, said))
    assert found.format == form
    # It computes NVFP4's numbers in bfloat16.
    near = 2.0**-7 if form == "nvfp4" else 1e-6
    torch.testing.assert_close(found.dequantize(), plain, rtol=near, atol=1e-7)
    mixed = read(save(tmp_path, tensors, said | {"format": "mixed-precision"}))
    assert torch.equal(mixed.dequantize(), found.dequantize())


@pytest.mark.parametrize("layout", ["pack-quantized", "int-quantized"])
@pytest.mark.parametrize("shift", [0, 5])
def test_codes_of_eight_bits_around_another_zero_are_refused(layout: str, shift: int, tmp_path: Path) -> None:
    """int8 has no zero points here: dropping them would move every number. Stored zeros are none."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    scale = QuantizedTensor.quantize(weight(), "int8").scale
    zero = torch.full_like(scale, shift).to(torch.int8)
    made = scheme(num_bits=8, type="int", strategy="channel", symmetric=False)
    tensors, plain = compressed(layout, made, {"weight_scale": scale, "weight_zero_point": zero})
    assert any("zero_point" in name for name in tensors)
    folder = save(tmp_path, tensors, {"quant_method": "compressed-tensors", "format": layout})
    if not shift:
        torch.testing.assert_close(read(folder).dequantize(), plain, rtol=1e-6, atol=1e-7)
        return
    with pytest.raises(FormatError, match="weight_zero_point needs zeros") as caught:
        lz.load_quantized(folder)
    assert caught.value.reason is Reason.ZERO_POINT_MISMATCH


@pytest.mark.parametrize("layout", ["pack-quantized", "int-quantized"])
@pytest.mark.parametrize("shift", [0, 5])
def test_another_zero_is_refused_in_a_folder_of_ours(layout: str, shift: int, tmp_path: Path) -> None:
    """The same without the library: codes of eight bits as they lie, and zeros as they are packed."""
    made = QuantizedTensor.quantize(weight(), "int8")
    zero = torch.full_like(made.scale, shift).to(torch.int8)
    tensors = {f"{NAME}.weight_scale": made.scale}
    if layout == "int-quantized":
        tensors |= {f"{NAME}.weight": made.codes, f"{NAME}.weight_zero_point": zero}
    else:
        unsigned = (made.codes.int() + 128).to(torch.uint8)
        zeros = torch.full((len(zero) // 4, 4), 128 + shift, dtype=torch.uint8)
        tensors |= {
            f"{NAME}.weight_packed": unsigned.view(torch.int32),
            f"{NAME}.weight_shape": torch.tensor(made.shape),
            f"{NAME}.weight_zero_point": zeros.view(torch.int32),
        }
    folder = save(tmp_path, tensors, {"quant_method": "compressed-tensors", "format": layout})
    if not shift:
        assert torch.equal(read(folder).dequantize(), made.dequantize())
        return
    with pytest.raises(FormatError, match="weight_zero_point needs zeros") as caught:
        lz.load_quantized(folder)
    assert caught.value.reason is Reason.ZERO_POINT_MISMATCH


def test_what_bitsandbytes_quantizes_is_read_as_it_dequantizes_it(tmp_path: Path) -> None:
    """Its CPU build, with scales that are quantized themselves."""
    library = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    packed, state = library.quantize_4bit(weight(), blocksize=64, compress_statistics=True, quant_type="nf4")
    parts = {f"{NAME}.weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    found = read(save(tmp_path, {f"{NAME}.weight": packed, **parts}, said))
    torch.testing.assert_close(
        found.dequantize(), library.dequantize_4bit(packed, state), rtol=1e-5, atol=1e-6
    )


# -- folders that are not what they say -------------------------------------------------------------------


def test_every_convention_read_as_every_other_is_refused(tmp_path: Path) -> None:
    """A folder that claims one format and holds another: a named error with a code, for each pair."""
    kinds = ["awq", "gptq", "nf4", "mxfp4", "nvfp4", "fp8 by block", "modelopt fp8"]
    for held in kinds:
        for claimed in kinds:
            tensors, said = WRITERS[held]()[0], WRITERS[claimed]()[1]
            if held == claimed:
                continue
            with pytest.raises(FormatError) as caught:
                lz.load_quantized(save(tmp_path, tensors, said)).check()
            assert caught.value.reason is Reason.CHECKPOINT_FORMAT_MISMATCH, (held, claimed)


def test_plain_weights_are_no_quantized_ones(tmp_path: Path) -> None:
    """The error says what was looked for, and what other formats the names belong to."""
    folder = save(tmp_path, {f"{NAME}.weight": weight()}, WRITERS["awq"]()[1])
    with pytest.raises(
        FormatError, match=r"needs tensors named \*\.qweight, as awq stores int4, got none of 1"
    ):
        lz.load_quantized(folder)
    folder = save(tmp_path, WRITERS["fp8 by block"]()[0], WRITERS["awq"]()[1])
    with pytest.raises(FormatError, match="but such of fp8"):
        lz.load_quantized(folder)


CLAIMS: list[tuple[Any, str]] = [
    (None, "needs a quantization_config, got none"),
    ({"quant_method": "exl3"}, "needs a quant_method of awq, .*, got 'exl3'"),
    ({"quant_method": "gptq", "bits": 3}, "needs bits of 4 for gptq, got 3"),
    ({"quant_method": "awq", "bits": 4, "version": "marlin"}, "needs awq's version gemm, got 'marlin'"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "needs bitsandbytes' load_in_4bit"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "needs modelopt's quant_algo FP8 or NVFP4"),
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "needs compressed-tensors' format"),
    ({"quant_method": "fp8"}, "needs fp8's weight_block_size of two equal sides, got None"),
    *(
        ({"quant_method": "fp8", "weight_block_size": sides}, "weight_block_size of two equal sides")
        for sides in ([0, 0], [-8, -8], ["a", "a"], [[8], [8]], [128], [128, 64], 128)
    ),
]  # fmt: skip


@pytest.mark.parametrize(("said", "message"), CLAIMS)
def test_a_format_that_is_not_read_is_named(said: Any, message: str, tmp_path: Path) -> None:
    """Before any tensor is."""
    folder = save(tmp_path, {f"{NAME}.weight": weight()}, said)
    with pytest.raises(FormatError, match=message) as caught:
        lz.load_quantized(folder)
    assert caught.value.reason is Reason.CHECKPOINT_FORMAT_MISMATCH


def _changed(kind: str, end: str, value: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, said, _ = WRITERS[kind]()
    if value is None:
        del tensors[NAME + end]
    else:
        tensors[NAME + end] = value(tensors[NAME + end])
    return tensors, said


BROKEN: list[tuple[str, str, Any, Reason]] = [
    ("awq", ".scales", None, Reason.CHECKPOINT_FORMAT_MISMATCH),
    ("awq", ".scales", lambda t: t[:2], Reason.CHECKPOINT_FORMAT_MISMATCH),
    ("awq", ".scales", lambda t: t.int(), Reason.CHECKPOINT_FORMAT_MISMATCH),
    ("awq", ".scales", lambda t: t * 0, Reason.SCALE_NOT_POSITIVE),
    ("awq", ".scales", lambda t: t * torch.nan, Reason.SCALE_NOT_FINITE),
    ("awq", ".qzeros", lambda t: t[:, :1], Reason.CHECKPOINT_FORMAT_MISMATCH),
    ("gptq", ".g_idx", lambda t: t.flip(0), Reason.PACKED_LAYOUT_MISMATCH),
    ("gptq", ".qweight", lambda t: t.long(), Reason.CHECKPOINT_FORMAT_MISMATCH),
    ("gptq", ".qzeros", lambda t: torch.full_like(t, -1), Reason.ZERO_POINT_MISMATCH),
    ("nf4", ".weight.quant_map", lambda t: t.flip(0), Reason.CHECKPOINT_FORMAT_MISMATCH),
    ("nf4", ".weight", lambda t: t[:-1], Reason.CHECKPOINT_FORMAT_MISMATCH),
    ("nvfp4", ".weight_scale", lambda t: t.float(), Reason.CHECKPOINT_FORMAT_MISMATCH),
    ("nvfp4", ".weight_scale_2", lambda t: -t, Reason.SCALE_NOT_POSITIVE),
    ("fp8 by block", ".weight_scale_inv", lambda t: t[:1], Reason.CHECKPOINT_FORMAT_MISMATCH),
    ("fp8 by block", ".weight", lambda t: t.to(torch.float8_e5m2), Reason.CHECKPOINT_FORMAT_MISMATCH),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "end", "value", "reason"), BROKEN)
def test_a_part_that_does_not_fit_is_named(
    kind: str, end: str, value: Any, reason: Reason, tmp_path: Path
) -> None:
    """Of a wrong shape, dtype, sign or order, or missing: which tensor, and a code."""
    folder = save(tmp_path, *_changed(kind, end, value))
    with pytest.raises(FormatError) as caught:
        lz.load_quantized(folder)
    assert caught.value.reason is reason


ODD: list[Tensor] = [
    torch.ones(()),
    torch.ones(0),
    torch.ones(3),
    torch.ones(1, 1),
    torch.ones(2, 3, 5),
    torch.full((8, 64), 255.0),
]


@pytest.mark.parametrize("kind", WRITERS)
def test_a_part_of_any_shape_is_read_or_refused(kind: str, tmp_path: Path) -> None:
    """Every part exchanged for tensors of its dtype and other axes: `FormatError`, nothing of torch's own."""
    tensors, said, _ = WRITERS[kind]()
    for name, odd in itertools.product(tensors, ODD):
        folder = save(tmp_path, tensors | {name: odd.to(tensors[name].dtype)}, said)
        try:
            lz.load_quantized(folder).check()
        except FormatError as error:
            assert error.reason in Reason


STATES: list[dict[str, Any]] = [
    {"blocksize": 0}, {"blocksize": "x"}, {"shape": [-16, -128]}, {"shape": 3}, {"shape": [1 << 40, 1 << 40]},
    {"nested_blocksize": 0, "nested_offset": 0.0}, {"nested_blocksize": 1 << 60, "nested_offset": "x"},
    {"nested_blocksize": 16},
]  # fmt: skip


@pytest.mark.parametrize("changes", STATES)
def test_a_state_that_fits_no_weight_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    """Whatever bitsandbytes' own description of a weight says; a key that it lacks is no missing weight."""
    tensors, said, _ = WRITERS["nf4"]()
    (name,) = (name for name in tensors if "quant_state" in name)
    state = json.loads(bytes(tensors[name].tolist())) | changes
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    if "nested_blocksize" in changes:
        tensors |= {
            f"{NAME}.weight.nested_absmax": torch.ones(1),
            f"{NAME}.weight.nested_quant_map": torch.ones(256),
            f"{NAME}.weight.absmax": torch.ones_like(tensors[f"{NAME}.weight.absmax"], dtype=torch.uint8),
        }
    with pytest.raises(FormatError) as caught:
        lz.load_quantized(save(tmp_path, tensors, said))
    assert caught.value.reason is Reason.CHECKPOINT_FORMAT_MISMATCH


def test_a_damaged_file_or_index_is_named(tmp_path: Path) -> None:
    """Neither safetensors' own error nor one of a JSON value's type."""
    folder = save(tmp_path, *WRITERS["awq"]()[:2])
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    for written in ("{}", '{"weight_map": ["a"]}', "[" * 100_000):
        index.write_text(written, encoding="utf-8")
        with pytest.raises(FormatError, match=r"index\.json needs"):
            lz.load_quantized(folder)
    index.unlink()
    whole.write_bytes(whole.read_bytes()[:-9])
    with pytest.raises(FormatError, match=r"model\.safetensors needs a file of safetensors"):
        lz.load_quantized(folder)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "hf_quant_config.json").write_text('{"quantization": [1]}', encoding="utf-8")
    with pytest.raises(FormatError, match="needs a quantization_config"):
        lz.load_quantized(folder)


def test_asking_whether_there_is_a_weight_reads_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a damaged one neither."""
    checkpoint = lz.load_quantized(save(tmp_path, *WRITERS["awq"]()[:2]))

    def read_none(*args: object) -> Any:
        raise AssertionError(args)

    monkeypatch.setattr(TensorFolder, "tensor", read_none)
    assert f"{NAME}.weight" in checkpoint and f"{NAME}.qweight" not in checkpoint


@pytest.mark.parametrize(("order", "fits"), [([0, 0, 0, 1], False), ([0, 0, 1, 1], True), ([-1] * 4, True)])
def test_an_order_of_groups_that_is_sorted_may_still_be_another(
    order: list[int], fits: bool, tmp_path: Path
) -> None:
    """Groups of other sizes than their scales say are refused; -1 stands for no order."""
    groups = torch.tensor(order).repeat_interleave(32).int()
    made = QuantizedTensor.quantize(weight(), "int4", group_size=64)
    tensors = {
        f"{NAME}.weight_packed": made.codes.view(torch.int32), f"{NAME}.weight_scale": made.scale,
        f"{NAME}.weight_shape": torch.tensor([16, 128]), f"{NAME}.weight_g_idx": groups,
    }  # fmt: skip
    folder = save(tmp_path, tensors, {"quant_method": "compressed-tensors", "format": "pack-quantized"})
    if fits:
        assert torch.equal(read(folder).dequantize(), made.dequantize())
    else:
        with pytest.raises(FormatError, match="groups of neighbours"):
            lz.load_quantized(folder)


def test_the_largest_zero_point_is_fifteen(tmp_path: Path) -> None:
    """GPTQ stores them less one: of 14 it is read, of 15 refused by the tensor's name."""
    tensors, said, _ = WRITERS["gptq"]()
    zeros, exact = f"{NAME}.qzeros", read(save(tmp_path, tensors, said))
    tensors[zeros] = writers.int32_of(torch.full((4, 2, 8), 14))
    found = read(save(tmp_path, tensors, said))
    wanted = exact.dequantize() - 7 * exact.scale.float().repeat_interleave(32, 1)
    torch.testing.assert_close(found.dequantize(), wanted)
    tensors[zeros] = writers.int32_of(torch.full((4, 2, 8), 15))
    with pytest.raises(FormatError, match=rf"{zeros} needs zero points of 0 to 15, got 16") as refused:
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
    with pytest.raises(FormatError, match=r"weight_g_idx of shape \(1099511627776,\), .*got \(128,\)"):
        read(save(tmp_path, parts, said))


def test_an_index_may_not_name_files_outside_of_its_folder(tmp_path: Path) -> None:
    """Nor tensors that its files do not hold; a folder without weights or configuration is no checkpoint."""
    folder = save(tmp_path / "one", *WRITERS["awq"]()[:2])
    index = folder / "model.safetensors.index.json"
    for file in ("../model.safetensors", "/etc/passwd", "pytorch_model.bin"):
        index.write_text(json.dumps({"weight_map": {"a": file}}), encoding="utf-8")
        with pytest.raises(FormatError, match="needs files of its folder"):
            lz.load_quantized(folder)
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}), encoding="utf-8")
    with pytest.raises(FormatError, match="needs tensors that its files hold, got a"):
        lz.load_quantized(folder)
    index.write_text("[", encoding="utf-8")
    with pytest.raises(FormatError, match="needs JSON"):
        lz.load_quantized(folder)
    index.unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"needs model\.safetensors"):
        lz.load_quantized(folder)
    with pytest.raises(FileNotFoundError, match=r"needs config\.json"):
        lz.load_quantized(tmp_path)


def test_weights_in_several_files_are_found_by_their_index(tmp_path: Path) -> None:
    """What is not quantized comes as it is; the mapping has each weight once."""
    tensors, said, numbers = writers.awq()
    folder = save(tmp_path, tensors, said)
    save_file({"model.norm.weight": torch.ones(4)}, folder / "other.safetensors")
    names = {name: "model.safetensors" for name in tensors} | {"model.norm.weight": "other.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}), encoding="utf-8")
    checkpoint = lz.load_quantized(folder)
    assert list(checkpoint) == [f"{NAME}.weight", "model.norm.weight"] and len(checkpoint) == 2
    assert torch.equal(checkpoint.dequantized("model.norm.weight"), torch.ones(4))
    torch.testing.assert_close(checkpoint.dequantized(f"{NAME}.weight"), numbers)
    assert checkpoint.method == "awq" and checkpoint.says == "int4" and "awq int4, 1 of 2" in repr(checkpoint)
    with pytest.raises(KeyError, match="lm_head"):
        checkpoint["lm_head.weight"]
