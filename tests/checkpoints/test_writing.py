"""`lz quantize`: what it writes, what it says that costs, and what it refuses without a trace."""

# Values whose shape the code has checked, or that a table names.
# pyright: reportArgumentType=false

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

import layerzero as lz
from layerzero.checkpoints import rounding
from layerzero.checkpoints.writing import LAYOUTS, quantize_folder
from layerzero.cli import main
from layerzero.formats import QuantizedTensor
from layerzero.formats.errors import FormatError
from layerzero.spec.errors import BackendNotAvailableError
from layerzero.spec.reasons import Reason

NAMES = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj")


def model(folder: Path, width: int = 256, files: int = 1) -> Path:
    """A folder with two matrices, an embedding, a norm and a tokenizer's file."""
    folder.mkdir()
    random = torch.Generator().manual_seed(0)
    tensors = {f"{name}.weight": torch.randn(16, width, generator=random).half() for name in NAMES}
    tensors |= {"model.embed_tokens.weight": torch.randn(32, width), "model.norm.weight": torch.ones(width)}
    place = {name: f"model-{at % files}.safetensors" for at, name in enumerate(tensors)}
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
    else:
        for file in set(place.values()):
            save_file({name: t for name, t in tensors.items() if place[name] == file}, folder / file)
        index = json.dumps({"weight_map": place})
        (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return folder


@pytest.mark.parametrize("form", LAYOUTS)
@pytest.mark.parametrize("files", [1, 2])
def test_what_is_written_is_read_as_it_was_rounded(form: str, files: int, tmp_path: Path) -> None:
    """Codes and scales to the bit, other tensors as they were, in as many files; errors as they are."""
    source, seen = model(tmp_path / "plain", files=files), []
    report = quantize_folder(
        source, tmp_path / "out", form, progress=lambda done, total, name: seen.append((done, total, name))
    )
    checkpoint = lz.load_quantized(tmp_path / "out")
    assert set(checkpoint.quantized) == {f"{name}.weight" for name in NAMES}
    plain = {name: t for file in source.glob("*.safetensors") for name, t in load_file(file).items()}
    for layer in report.layers:
        weight = checkpoint[layer.name]
        assert isinstance(weight, QuantizedTensor) and weight.format == form
        exact = plain[layer.name].float()
        size = weight.group_size if form == "int4" else None
        wanted = QuantizedTensor.quantize(exact, form, group_size=size)
        torch.testing.assert_close(weight.dequantize(), wanted.dequantize(), rtol=1e-6, atol=0)
        error = float((weight.dequantize() - exact).norm() / exact.norm())
        assert layer.weight == pytest.approx(error, rel=1e-4) and 0 < error < 0.2 and layer.output is None
        assert layer.bits == pytest.approx(8 * weight.nbytes / exact.numel(), abs=1e-3)
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(checkpoint.dequantized(name), plain[name].float())
    assert (tmp_path / "out" / "tokenizer.json").read_text(encoding="utf-8") == "{}"
    assert [(done, total) for done, total, _ in seen] == [(1, 2), (2, 2)]
    assert report.bytes_after < report.bytes_before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "plain"]


def test_a_single_file_keeps_the_name_that_its_index_gives(tmp_path: Path) -> None:
    """What is written is read back, whatever the file of the model is called."""
    source, file = model(tmp_path / "plain"), "model-00001-of-00001.safetensors"
    (source / "model.safetensors").rename(source / file)
    place = dict.fromkeys(load_file(source / file), file)
    index = "model.safetensors.index.json"
    (source / index).write_text(json.dumps({"weight_map": place}), encoding="utf-8")
    quantize_folder(source, tmp_path / "out", "int4")
    checkpoint = lz.load_quantized(tmp_path / "out")
    assert set(checkpoint.quantized) == {f"{name}.weight" for name in NAMES}
    assert torch.equal(checkpoint.dequantized("model.norm.weight"), torch.ones(256))
    written = json.loads((tmp_path / "out" / index).read_text(encoding="utf-8"))["weight_map"]
    assert set(written.values()) == {file}


def test_errors_of_outputs_are_those_of_the_rows_that_ran(tmp_path: Path) -> None:
    """|X (W - Q)'| / |X W'| out of the sum of products alone."""
    source, rows = model(tmp_path / "plain"), torch.randn(50, 256, dtype=torch.float64)
    name = f"{NAMES[0]}.weight"
    report = quantize_folder(source, tmp_path / "out", "int4", grams={name: rows.T @ rows}, tokens=50)
    first, second = report.layers if report.layers[0].name == name else report.layers[::-1]
    exact = load_file(source / "model.safetensors")[name].double()
    off = exact - lz.load_quantized(tmp_path / "out").dequantized(name, torch.float64)
    assert first.output == pytest.approx(float((rows @ off.T).norm() / (rows @ exact.T).norm()), rel=1e-6)
    assert second.output is None and report.calibration_tokens == 50


REFUSED: list[tuple[dict[str, Any], type[Exception], str, Reason | None]] = [
    ({"form": "nf4"}, FormatError, "format needs one of int4", Reason.QUANT_FORMAT_UNSUPPORTED),
    ({"method": "awq"}, ValueError, "method needs one of nearest, hqq, gptq, got 'awq'", None),
    ({"method": "gptq"}, ValueError, "method gptq needs calibrate, a text", None),
    (
        {"form": "nvfp4", "method": "hqq"}, FormatError, "one of int4, int8 for method hqq",
        Reason.QUANT_FORMAT_UNSUPPORTED,
    ),
    ({"group_size": 48}, FormatError, "group_size needs", Reason.GROUP_DOES_NOT_DIVIDE),
    (
        {"form": "int8", "group_size": 32}, FormatError, "group_size needs None for int8",
        Reason.QUANT_GROUP_UNSUPPORTED,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message", "reason"), REFUSED)
def test_what_does_not_fit_is_named_and_nothing_is_left(
    changes: dict[str, Any], error: type[Exception], message: str, reason: Reason | None, tmp_path: Path
) -> None:
    """No folder, no part of one."""
    source = model(tmp_path / "plain")
    with pytest.raises(error, match=message) as caught:
        quantize_folder(source, tmp_path / "out", **({"form": "int4"} | changes))
    assert getattr(caught.value, "reason", None) is reason
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_a_weight_that_is_not_finite_or_a_folder_that_is_quantized_is_refused(tmp_path: Path) -> None:
    """The second weight fails after the first was rounded: nothing of it is left either."""
    source = model(tmp_path / "plain")
    with pytest.raises(FileExistsError, match="needs to be a new folder"):
        quantize_folder(source, source, "int8")
    quantize_folder(source, tmp_path / "once", "int8")
    with pytest.raises(FormatError, match="weights that are not quantized yet") as caught:
        quantize_folder(tmp_path / "once", tmp_path / "twice", "int8")
    assert caught.value.reason is Reason.CHECKPOINT_FORMAT_MISMATCH
    tensors = load_file(source / "model.safetensors")
    tensors[f"{NAMES[1]}.weight"][3, 4] = torch.nan
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(FormatError, match="finite numbers"):
        quantize_folder(source, tmp_path / "twice", "int8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["once", "plain"]


def test_a_method_of_a_library_that_is_missing_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before anything is read or written."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendNotAvailableError, match="method hqq needs torchao") as caught:
        quantize_folder(model(tmp_path / "plain"), tmp_path / "out", "int4", method="hqq")
    assert caught.value.backend == "torchao" and not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", rounding.HQQ_FORMATS)
def test_half_quadratic_scales_err_less_than_the_nearest(form: str, tmp_path: Path) -> None:
    """torchao's method, by the same report; what it writes is read back."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    source = model(tmp_path / "plain")
    reports = [quantize_folder(source, tmp_path / name, form, method=name) for name in ("nearest", "hqq")]
    nearest, better = ([layer.weight for layer in report.layers] for report in reports)
    assert sum(better) < sum(nearest)
    lz.load_quantized(tmp_path / "hqq").check()


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def test_the_command_writes_a_folder_and_says_what_each_weight_costs(tmp_path: Path) -> None:
    """A table for people, the report as JSON; a folder beside the model where none is named."""
    source = model(tmp_path / "plain")
    told = run("quantize", source, "--format", "int4", "--ignore", "*down_proj*")
    assert told.exit_code == 0, told.output
    assert f"{NAMES[0]}.weight" in told.output and f"{NAMES[1]}.weight" not in told.output
    assert f"wrote {tmp_path / 'plain-int4'}" in told.output
    said = json.loads((tmp_path / "plain-int4" / "config.json").read_text(encoding="utf-8"))
    assert said["quantization_config"]["ignore"] == ["lm_head", "model.embed_tokens", NAMES[1]]
    report = json.loads(run("quantize", source, "--format", "int8", "--json").output)
    assert report["format"] == "int8" and len(report["layers"]) == 2


def test_the_command_says_why_it_did_not(tmp_path: Path) -> None:
    """Exit status 1, the error and its code; a text of one token calibrates nothing."""
    source = model(tmp_path / "plain")
    told = run("quantize", source, "--format", "int3")
    assert told.exit_code == 1 and "format needs one of int4" in told.output
    assert "(QUANT_FORMAT_UNSUPPORTED)" in told.output and "Traceback" not in told.output
    told = run("quantize", source, "--format", "int4", "--out", source)
    assert told.exit_code == 1 and "needs to be a new folder" in told.output
    told = run("quantize", tmp_path / "none", "--format", "int4")
    assert told.exit_code == 2


def test_the_command_names_a_folder_beside_the_model_wherever_it_is_called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From within the model's own folder too; a format that is none names no other place."""
    source = model(tmp_path / "plain")
    monkeypatch.chdir(source)
    told = run("quantize", ".", "--format", "int8")
    assert told.exit_code == 0 and (tmp_path / "plain-int8" / "config.json").exists(), told.output
    told = run("quantize", ".", "--format", "../x")
    assert told.exit_code == 1 and "format needs one of int4" in told.output
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    told = run("quantize", source, "--format", "int8", "--out", tmp_path / "link")
    assert told.exit_code == 1 and "needs to be a new folder" in told.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "plain", "plain-int8"]


def test_what_cannot_be_written_is_said_before_a_text_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Minutes of a large model are not spent on a folder that is there; a text that is none is named."""
    from layerzero.checkpoints import calibration

    monkeypatch.setattr(calibration, "run_text", lambda *args: pytest.fail("a text ran"))
    source = model(tmp_path / "plain")
    (tmp_path / "text").write_bytes(b"\xff\xfe\xff")
    options = ("quantize", source, "--calibrate", tmp_path / "text")
    for named, said in (
        (("--format", "int3"), "format needs one of"),
        (("--format", "int8", "--out", source), "needs to be a new folder"),
        (("--format", "int8", "--method", "best"), "method needs one of"),
        (("--format", "int8"), "--calibrate needs a text in UTF-8"),
    ):
        told = run(*options, *named)
        assert told.exit_code == 1 and said in told.output, told.output


def test_a_text_runs_through_the_model_before_its_weights_are_judged(tmp_path: Path) -> None:
    """The shipped model and words of its text: every matrix gets an error of its outputs."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    shipped = Path(__file__).resolve().parents[2] / "examples" / "data" / "generate"
    (tmp_path / "text").write_text("And Jesus said unto them, come and see. " * 4, encoding="utf-8")
    told = run(
        "quantize", shipped, "--format", "int8", "--out", tmp_path / "out", "--calibrate", tmp_path / "text",
        "--json",
    )  # fmt: skip
    assert told.exit_code == 0, told.output
    report = json.loads(told.stdout)
    assert len(report["layers"]) == 28 and report["calibration_tokens"] > 20
    assert all(0 < layer["output"] < 0.03 for layer in report["layers"])
    (tmp_path / "short").write_text("", encoding="utf-8")
    none = ("--out", tmp_path / "no", "--calibrate", tmp_path / "short")
    told = run("quantize", shipped, "--format", "int8", *none)
    assert told.exit_code == 1 and "needs a text of at least two tokens" in told.output
    assert not (tmp_path / "no").exists()


def test_gptq_errs_less_in_what_the_text_computes(tmp_path: Path) -> None:
    """The shipped model by the command: every output's error, but for a few, below that of the nearest."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    shipped = Path(__file__).resolve().parents[2] / "examples" / "data" / "generate"
    (tmp_path / "text").write_text("And Jesus said unto them, come and see. " * 40, encoding="utf-8")
    errors: dict[str, list[float]] = {}
    for method in ("nearest", "gptq"):
        told = run(
            "quantize", shipped, "--format", "int4", "--method", method, "--out", tmp_path / method,
            "--calibrate", tmp_path / "text", "--json",
        )  # fmt: skip
        assert told.exit_code == 0, told.output
        errors[method] = [layer["output"] for layer in json.loads(told.stdout)["layers"]]
    lz.load_quantized(tmp_path / "gptq").check()
    assert sum(errors["gptq"]) < 0.8 * sum(errors["nearest"])
    better = [a < b for a, b in zip(errors["gptq"], errors["nearest"], strict=True)]
    assert sum(better) > 0.8 * len(better)
    told = run("quantize", shipped, "--format", "int4", "--method", "gptq", "--out", tmp_path / "none")
    assert told.exit_code == 1 and "method gptq needs calibrate" in told.output
    assert not (tmp_path / "none").exists()


def test_a_weight_that_no_row_of_the_text_reached_is_rounded_to_the_nearest(tmp_path: Path) -> None:
    """As an expert that no token chose; the others by the rows they multiplied."""
    source, rows = model(tmp_path / "plain"), torch.randn(50, 256, dtype=torch.float64)
    grams = {f"{NAMES[0]}.weight": rows.T @ rows}
    for method in ("gptq", "nearest"):
        quantize_folder(source, tmp_path / method, "int4", method=method, grams=grams, tokens=50)
    by_text, plain = (lz.load_quantized(tmp_path / method) for method in ("gptq", "nearest"))
    same = [torch.equal(by_text.dequantized(f"{n}.weight"), plain.dequantized(f"{n}.weight")) for n in NAMES]
    assert same == [False, True]


def test_a_missing_transformers_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Calibration alone needs it."""
    from layerzero.checkpoints import calibration

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendNotAvailableError, match="calibrate needs transformers"):
        calibration.run_text(tmp_path, "text", [])


def test_transformers_reads_what_is_written_to_the_number(tmp_path: Path) -> None:
    """Its own reader of compressed-tensors, over the shipped model in four bits."""
    for package in ("transformers", "compressed_tensors"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    from transformers import AutoModelForCausalLM

    shipped = Path(__file__).resolve().parents[2] / "examples" / "data" / "generate"
    quantize_folder(shipped, tmp_path / "out", "int4")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    checkpoint, ids = lz.load_quantized(tmp_path / "out"), torch.arange(2, 20)[None]
    with torch.no_grad():
        found = theirs(ids).logits
    plain = AutoModelForCausalLM.from_pretrained(shipped, dtype=torch.float32)
    weights = plain.state_dict()
    for name in checkpoint.quantized:
        weights[name].copy_(checkpoint.dequantized(name))
    with torch.no_grad():
        torch.testing.assert_close(found, plain(ids).logits, atol=1e-5, rtol=1e-5)
