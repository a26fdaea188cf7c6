"""Speculation over the ranks of a rank group: the example, with gloo between its shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed import forked

pytest.importorskip("safetensors", reason="the example needs safetensors")
pytest.importorskip("tokenizers", reason="the example needs tokenizers")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "speculate.py"


def test_two_ranks_accept_what_one_process_accepts(tmp_path: Path) -> None:
    """Four sampled texts, drafted on rank 0: each rank knows the text, one process's; no page leaks."""
    out = tmp_path / "speculation.json"
    ended = forked.run_ranks(2, [str(EXAMPLE), "--tokens", "24", "--json", str(out)], tmp_path, 120)
    assert [each.returncode for each in ended] == [0, 0], ended
    first, second = json.loads(out.read_text())
    assert first["plan"] == second["plan"]
    assert first["tokens"] == first["alone"] and len(first["tokens"]) == 4
    for number, text in first["tokens"].items():
        assert len(text) == 24
        assert first["settled"][number][:24] == second["settled"][number][:24] == text
    assert all(0 < share < 1 for share in first["acceptance"]), "some drafts stay and some go"
    assert first["pages_leaked"] == second["pages_leaked"] == 0
