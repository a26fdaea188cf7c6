"""The comparison of transformers' families, patched and as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import layerzero as lz

pytest.importorskip("transformers", reason="the model library is missing: .[hf]")

from benchmarks import families

RECORD = Path(families.__file__).with_name("results") / "families_cpu.json"


@pytest.mark.parametrize(
    ("family", "state"),
    [
        ("llama", "equal"),
        ("gpt_oss", "equal"),
        ("bigbird_pegasus", "equal"),
        ("inkling2_text", "equal, falls back"),
        ("bloom", "equal, without attention"),
    ],
)
def test_a_family_is_compared(family: str, state: str) -> None:
    """Small models of families of each kind end in the state that the record has for them."""
    with lz.start(lz.Settings.load(warm="off", device="cpu")) as runtime:
        found = families.compare(family, runtime)
    assert found["state"] == state
    assert json.loads(RECORD.read_text())["families"]["causal"][family]["state"] == state


def test_no_family_differs() -> None:
    """What was run gives its own logits, and no kernel was blamed."""
    record = json.loads(RECORD.read_text())
    wrong = {
        name: row
        for families_of_kind in record["families"].values()
        for name, row in families_of_kind.items()
        if row["state"].startswith(("differs", "failed"))
    }
    assert not wrong and record["kernels_in_trouble"] == []
    equal = {
        kind: sum(row["state"].startswith("equal") for row in rows.values())
        for kind, rows in record["families"].items()
    }
    assert equal["causal"] >= 120 and equal.keys() == families.KINDS.keys() and min(equal.values()) >= 10


def test_each_kind_is_compared() -> None:
    """An encoder, an encoder-decoder and a vision model of the smallest."""
    with lz.start(lz.Settings.load(warm="off", device="cpu")) as runtime:
        for kind, family in (("encoder", "bert"), ("encoder-decoder", "bart"), ("vision", "vit")):
            row = families.compare(family, runtime, kind)
            assert row["state"] == "equal" and {"attention", "layer_norm"} <= row["ops"].keys()


def test_a_difference_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks that are dropped make another state."""
    real: Any = lz.sync.attention

    def without(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **{**kwargs, "sinks": None})

    monkeypatch.setattr(lz.sync, "attention", without)
    with lz.start(lz.Settings.load(warm="off", device="cpu")) as runtime:
        assert families.compare("gpt_oss", runtime)["state"] == "differs"
