"""Two servers compared behind HTTP: what the client counts, what a row says, and sides that fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import popen

pytest.importorskip("uvicorn")  # the serve extra
pytest.importorskip("tokenizers")

import layerzero as lz

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from generating.folder import TINY, write_folder  # noqa: E402
from generating.streams import Reply, Shape, bodies, dechunked  # noqa: E402

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def event(text: str) -> bytes:
    """One event of a completion as a chunk."""
    body = f"data: {json.dumps({'choices': [{'text': text}]})}\n\n".encode()
    return f"{len(body):x}\r\n".encode() + body + b"\r\n"


DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


@pytest.mark.parametrize("cut", [1, 3, 7, 50, 10_000])
def test_tokens_are_counted_however_the_bytes_are_cut(cut: int) -> None:
    """Every token counts once, at the time of the bytes that completed its event."""
    sent = HEAD + event("aaaa") + event("bbbbcccc") + DONE
    reply = Reply(0.0, 3, [(float(at), sent[at : at + cut]) for at in range(0, len(sent), cut)])
    reply.read()
    assert (reply.error, sum(reply.counts)) == ("", 3)
    assert len(reply.times) == len(reply.counts) <= 2
    assert reply.times == sorted(reply.times)


@pytest.mark.parametrize(
    ("received", "error"),
    [
        (HEAD + event("aaaa") + DONE, "1 tokens, not the 2 that were asked for"),
        (HEAD + event("aaaabbbb"), "cut off after 2 tokens"),
        (b"HTTP/1.1 429 Too Many\r\n\r\nbusy", "HTTP/1.1 429 Too Many busy"),
        (b"", "nothing was answered"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error(received: bytes, error: str) -> None:
    """A wrong number of tokens, an end without its mark, a refusal, and nothing at all."""
    reply = Reply(0.0, 2, [(0.0, received)] if received else [])
    reply.read()
    assert reply.error == error


def test_half_a_chunk_waits() -> None:
    """Only whole chunks are taken."""
    assert dechunked(b"2\r\nab\r\n3\r\nc") == (b"ab", b"3\r\nc")


def test_requests_are_the_same_for_the_same_seed() -> None:
    """Both servers get the same requests, within the bounds of the shape."""
    shape = Shape((3, 5), (2, 4), 64)
    first, second = bodies(shape, "m", 7), bodies(shape, "m", 7)
    for _ in range(20):
        (body, asked), again = next(first), next(second)
        assert (body, asked) == again
        assert 3 <= len(body["prompt"]) <= 5
        assert asked == body["max_tokens"]
        assert body["ignore_eos"]


def test_every_token_of_the_folder_is_four_letters(tmp_path: Path) -> None:
    """A client counts tokens by letters."""
    write_folder(tmp_path, TINY)
    tokenizer = lz.Tokenizer(tmp_path)
    assert {len(tokenizer.token_text(token)) for token in tokenizer.ids} == {4}
    assert tokenizer.vocabulary == TINY["vocab_size"]


@pytest.mark.parametrize(
    ("peer", "error"),
    [
        pytest.param([], None, marks=pytest.mark.slow),
        (["--peer-command", f"{sys.executable} -c 'raise SystemExit(3)'"], "ended with status 3"),
    ],
    ids=["two", "peer ends"],
)
def test_a_run_measures_what_can_be_measured(tmp_path: Path, peer: list[str], error: str | None) -> None:
    """Every load has our row, whatever becomes of the peer, and its failure has a name."""
    status, record = run(tmp_path, "--shares", "0.5", *peer)
    row = record["loads"]["50%"]["LayerZero"]
    assert (row["errors"], row["requests"] > 0) == ({}, True)
    if error is None:
        assert record["loads"]["50%"]["over_peer"]
        assert (status, record["errors"]) == (0, {})
    else:
        assert error in record["errors"]["vLLM"]
        assert status == 1


@pytest.mark.slow
def test_what_the_budget_has_no_time_for_is_named(tmp_path: Path) -> None:
    """No measurement begins that would not end in time."""
    status, record = run(tmp_path, "--budget-s", "1")
    assert (status, record["loads"]) == (1, {})
    assert "LayerZero, closed 0" in record["left_out"]


def run(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The status and the record of a rehearsal."""
    script, out = ROOT / "benchmarks" / "engines_http.py", folder / "record.json"
    command = [sys.executable, str(script), "--rehearse", "--out", str(out), *arguments]
    done = popen.run(command, timeout=200)
    assert out.exists(), done.stderr[-2000:]
    return done.returncode, json.loads(out.read_text())
