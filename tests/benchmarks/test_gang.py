"""What agreement costs a rank group: a short run of real ranks gives every number of the table."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import gang


def test_every_piece_of_a_step_message_is_timed(tmp_path: Path) -> None:
    """Rank 0's pieces and a follower's, each for every step, and nothing written to the store by steps."""
    record = tmp_path / "gang.json"
    assert gang.main(["--ranks", "2", "--plans", "4", "--steps", "32", "--json", str(record)]) == 0
    row = json.loads(record.read_text())["ranks"]["2"]
    pieces = {"packed", "written", "sent", "received", "admitted", "unpacked", "step", "woken"}
    assert pieces <= set(row["manifest"])
    assert all(row["manifest"][name]["median_us"] > 0 for name in pieces - {"step", "woken"})
    assert row["agreement"]["median_us"] > 0
    # A rank may be at its next gate while another one counts: one key a gate, where steps would write 32.
    assert abs(row["store_keys_written_by_steps"]) <= 2
