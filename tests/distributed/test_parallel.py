"""`layerzero.parallel` on ranks that are processes, over gloo: results are those of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import forked
from tests.waiting import LIMIT_S

SCRIPT = str(Path(__file__).with_name("parts.py"))
OFF = 1e-4  # of logits of about ten


def run(ranks: int, scenarios: str, folder: Path, **variables: str) -> dict[str, list[dict[str, Any]]]:
    """What every rank that did not die said of each scenario, in the order of the ranks."""
    of_each = {rank: variables for rank in range(ranks)}
    ended = forked.run_ranks(ranks, [SCRIPT, scenarios], folder, LIMIT_S, of_each)
    lines = [json.loads(line) for rank in ended for line in rank.stdout.splitlines() if line[:1] == "{"]
    said = {
        name: sorted((line for line in lines if line["scenario"] == name), key=lambda line: line["rank"])
        for name in scenarios.split(",")
    }
    assert any(lines), ended
    return said


def test_every_layout_of_four_ranks_computes_what_one_process_does(tmp_path: Path) -> None:
    """Heads, columns, vocabulary, rows of norms and stages, shared out in every way; nine layers, uneven."""
    names = "4 x 1 sequence,2 x 2,2 x 2 sequence,1 x 4"
    said = run(4, names, tmp_path)
    for name, ranks in said.items():
        assert [rank.get("error") for rank in ranks] == [None] * 4, ranks
        assert ranks[0]["worst"] < OFF, (name, ranks)
        assert all(rank["ran"] == ranks[0]["ran"] for rank in ranks), "one message, one step"
    assert [rank["layers"] for rank in said["1 x 4"]] == [[0, 1], [2, 3], [4, 5], [6, 7, 8]]
    whole, rows = said["2 x 2"], said["2 x 2 sequence"]
    tokens = sum(whole[0]["ran"])
    assert [rank["sent"] for rank in whole] == [tokens * 64, tokens * 64, tokens * 96, 0]
    padded = sum(-(-step // 2) for step in rows[0]["ran"])
    assert [rank["sent"] for rank in rows][:2] == [padded * 64] * 2, "a rank passes on its own rows"


def test_eight_ranks_are_four_stages_of_two(tmp_path: Path) -> None:
    """Tensor parallel inside a pipeline: rank 0 of eight has the requests, and every rank runs every step."""
    said = run(8, "2 x 4 sequence", tmp_path)["2 x 4 sequence"]
    assert len(said) == 8 and said[0]["worst"] < OFF, said
    assert all(rank["ran"] == said[0]["ran"] for rank in said)


def test_as_many_batches_are_under_way_as_there_are_stages(tmp_path: Path) -> None:
    """The last stage waits until rank 0 has begun a batch for each: the others do not wait for its results.

    One caller is cancelled meanwhile, and one asks twice: it costs them alone.
    """
    said = run(3, "full", tmp_path)["full"]
    assert said[0].get("worst", 1.0) < OFF and said[0]["results"] == 8, said
    assert said[0]["cancelled"]
    assert said[0]["refused"] == ["request needs to be once in forward, got 1 again"]
    assert len(said[1]["ran"]) >= 3


def test_hosts_prepare_the_next_step_while_a_stage_computes(tmp_path: Path) -> None:
    """Each stage's first step lasts until its second one's rows are received, rank 0's until its second batch
    is formed."""
    said = run(3, "ahead", tmp_path)["ahead"]
    assert [rank.get("came") for rank in said] == [[True]] * 3, said
    assert said[0]["worst"] < OFF
    assert said[0]["inflight afterwards"] == 1, "other calls of that loop are batched as before"


def test_a_stage_that_dies_fails_every_caller(tmp_path: Path) -> None:
    """Whoever waits for a result of the stages gets DeviceLostError, and so does who comes later."""
    (said,) = [rank for rank in run(3, "dies", tmp_path)["dies"] if rank["rank"] == 0]
    answered = said["kinds"].count("Tensor")
    assert said["kinds"].count("DeviceLostError") == 9 - answered >= 6, said
    assert said["under_way"] == 0


def test_a_rank_with_another_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    """One number differs in one weight: every rank says which rank, and no process group was made."""
    safetensors = pytest.importorskip("safetensors.torch", reason="checkpoints need safetensors")
    for name, first in (("same", 0.0), ("other", 1.0)):
        (tmp_path / name).mkdir()
        weight = torch.zeros(64, 64)
        weight[5, 7] = first
        safetensors.save_file({"a.weight": weight}, tmp_path / name / "model.safetensors")
    said = run(2, "other checkpoint", tmp_path, CHECKPOINTS=str(tmp_path))["other checkpoint"]
    assert [(rank.get("made"), rank.get("reason")) for rank in said] == [(0, "RANKS_DIFFER")] * 2, said
    assert all(rank["said"].startswith("checkpoint needs to be rank 0's 'same ") for rank in said)
    assert all("got 'other " in rank["said"] and rank["said"].endswith("on rank 1") for rank in said)


def test_rows_travel_to_their_experts_and_back(tmp_path: Path) -> None:
    """Ranks with other numbers of rows, one with none: each row has the answer of experts in one place."""
    said = run(3, "experts", tmp_path)["experts"]
    assert [rank.get("rows") for rank in said] == [5, 0, 3], said
    assert max(rank["off"] for rank in said) < 1e-5
