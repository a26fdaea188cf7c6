"""Level 5 holds and finds what is planted; red flags are raised where they should be, and named."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.gates.model_parity import Row, largest, red_flags
from tests.parity.__main__ import main
from tests.parity.model import CONFIGS, llama, random_llama
from tests.parity.truth import Ours, Truth


def ran(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of level 5."""
    status = main(["--level", "5", "--json", *words])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, report


def test_training_holds_for_twenty_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """Losses, weights and gradients, the embedding's among them, of SGD and AdamW after 1, 5 and 20 steps."""
    status, report = ran(capsys, "--config", "tiny")
    assert status == 0, report["verdict"]
    what = {row["what"] for row in report["rows"]}
    assert {row["where"] for row in report["rows"]} == {"tiny, SGD", "tiny, AdamW"}
    for after in ("1 step", "5 steps", "20 steps"):
        assert {f"loss after {after}", f"gradient of model.embed_tokens.weight after {after}"} <= what
    assert report["flags"] == []


@pytest.mark.long
@pytest.mark.parametrize("config", ["tiny"])
def test_training_goes_the_same_way_for_a_hundred_steps(
    capsys: pytest.CaptureFixture[str], config: str
) -> None:
    """After a hundred steps the loss has fallen by as much on both sides."""
    status, report = ran(capsys, "--config", config, "--steps", "100")
    assert status == 0, report["verdict"]
    assert "fall of the loss after 100 steps" in {row["what"] for row in report["rows"]}


@pytest.mark.parametrize(
    ("plant", "first"),
    [
        ("cross_entropy", "loss after 1 step"),
        ("attention_backward", "gradient of model.embed_tokens.weight after 1 step"),
    ],
)
def test_a_bug_shows_in_the_first_step(capsys: pytest.CaptureFixture[str], plant: str, first: str) -> None:
    """A loss that is off, and a gradient that is two percent too large, are found after one step."""
    status, report = ran(capsys, "--config", "tiny", "--steps", "1", "--plant", plant)
    assert status == 1
    assert f"first {first} (tiny, SGD)" in report["verdict"]


def layers(bug: dict[int, float]) -> list[Row]:
    """The rows of a model of six layers in which the outputs of these layers' blocks are off by so much."""
    model, ids = random_llama(CONFIGS["deep"]), torch.arange(12)
    ours, count = Ours(), 0
    mlp = ours.mlp

    def broken(x: Tensor, up: Tensor, down: Tensor, *rest: Any) -> Tensor:
        nonlocal count
        whole = down.shape[0] == CONFIGS["deep"].hidden and down.shape[1] != x.shape[-1]
        out = mlp(x, up, down, *rest)
        if not whole or torch.is_inference_mode_enabled():
            return out
        return out + bug.get(count, 0.0)

    def record(name: str, value: Tensor) -> None:
        nonlocal count
        outputs[name] = value
        count = int(name.split()[1]) + 1 if name.endswith(" output") else count

    setattr(ours, "mlp", broken)  # noqa: B010
    outputs: dict[str, Tensor] = {}
    truth: dict[str, Tensor] = {}
    with lz.start(scoped=True), torch.no_grad():
        llama(ours, model.cast(torch.float32), ids, record)
        llama(Truth(), model.cast(torch.float64), ids, truth.__setitem__)
    names = [f"layer {index} output" for index in range(6)]
    return [Row(name, "deep", largest(outputs[name], truth[name]), 10.0) for name in names]


def test_a_sound_model_raises_no_flag() -> None:
    """Rounding that adds up over six layers is no red flag."""
    assert red_flags(layers({})) == []


def test_one_bad_layer_is_named() -> None:
    """A block that is off in the fourth layer alone is found there, though no bound is broken."""
    flags = red_flags(layers({3: 0.01}))
    assert len(flags) == 1
    assert flags[0].startswith("layer 3 is ")
    assert "times as far off as the layers before it (deep)" in flags[0]


def test_growth_from_layer_to_layer_is_named() -> None:
    """Differences that grow tenfold with each layer are found, with the layer that they grow from."""
    flags = red_flags(layers({index: 1e-5 * 10.0**index for index in range(1, 5)}))
    assert any("differences grow 4 times a layer or more from layer 0 on (deep)" in flag for flag in flags)


@pytest.mark.parametrize("difference", [1.5, float("inf"), float("nan")])
def test_what_is_far_off_is_named_whatever_is_allowed(difference: float) -> None:
    """A difference above 1, and one that is no number, is a red flag in a row that allows it."""
    row = Row("logits", "deep", difference, float("inf"))
    assert red_flags([row]) == [f"logits (deep) is {difference:.3g} apart"]
    assert red_flags([Row("logits", "deep", 0.9, float("inf"))]) == []


def test_a_planted_convention_is_a_red_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """An embedding that reads the next row is more than 1 apart: the command says so and fails."""
    status = main(["--level", "1", "--config", "tiny", "--plant", "embedding", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert status == 1
    assert any(flag.startswith("embedding forward (tiny)") for flag in report["flags"])
    assert "red flag: embedding forward" in report["verdict"]
