"""Logging: nothing configured by import, events where the application wants them, no secret in any."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from layerzero._util import log
from tests import children
from tests.profiles import many_examples

TOKEN = "hf_" + "AbCdEfGh12345678"


@pytest.fixture(autouse=True)
def structlog_as_before() -> Iterator[None]:
    """Leave structlog unconfigured, as these tests found it."""
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


def test_importing_configures_and_loads_nothing(tmp_path: Path) -> None:
    """A fresh import adds no handler, and neither it nor a first event loads structlog."""
    code = (
        "import logging, sys; before = list(logging.root.handlers);"
        "from layerzero._util import log; log.info('x.made');"
        "assert 'structlog' not in sys.modules and 'rich' not in sys.modules, 'loaded';"
        "assert logging.root.handlers == before and not logging.getLogger('layerzero').handlers"
    )
    done = children.run(code, folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_structlog_events_go_to_the_stdlib_logger(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """An application that configured nothing gets a stdlib record, and nothing on stdout."""
    with caplog.at_level(logging.INFO, "layerzero"):
        log.info("kernel.chosen", kernel="a.b", dims=[1, 2])
        log.debug("kernel.chosen", kernel="hidden")
        log.warning("hub.fetched", hf_token=TOKEN, note=f"with {TOKEN}")
    assert [r.getMessage() for r in caplog.records] == [
        "kernel.chosen kernel='a.b' dims=[1, 2]",
        "hub.fetched hf_token='[hidden]' note='with [hidden]'",
    ]
    assert capsys.readouterr().out == ""


def test_with_structlog_events_go_through_it() -> None:
    """An application that configured structlog gets every event through its own processors."""
    with structlog.testing.capture_logs() as events:
        structlog.configure(processors=structlog.get_config()["processors"])
        log.error("circuit.opened", kernel="a.b", hf_token=TOKEN)
    assert events == [
        {"event": "circuit.opened", "log_level": "error", "kernel": "a.b", "hf_token": log.HIDDEN}
    ]


def test_configure_writes_json_lines_with_secrets_hidden() -> None:
    """The command line's logger writes to the given stream, one JSON object a line."""
    stream = io.StringIO()
    log.configure(level="warning", json=True, stream=stream)
    log.info("kernel.chosen", kernel="a.b")
    log.warning("hub.fetched", url="https://user:pass@example.org/x", note=f"with {TOKEN}")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["hub.fetched"]
    assert lines[0]["url"] == "https://[hidden]@example.org/x" and TOKEN not in stream.getvalue()


def test_configure_refuses_an_unknown_level() -> None:
    """A wrong level is a ValueError that names the argument."""
    with pytest.raises(ValueError, match="level needs debug"):
        log.configure(level="loud")  # type: ignore[arg-type]


def redacted(text: str) -> str:
    """A text as an event shows it."""
    return str(log.redact(None, "info", {"note": text})["note"])


@pytest.mark.parametrize(
    "key",
    ["hf_token", "HF_TOKEN", "token", "Authorization", "api-key", "password", "client_secret", "set.cookie"],
)
def test_a_secret_key_hides_its_value(key: str) -> None:
    """Names whose last word says secret hide whatever they hold."""
    assert log.redact(None, "info", {"event": "x", key: "anything"})[key] == log.HIDDEN


@pytest.mark.parametrize("key", ["max_tokens", "tokens", "tokenizer", "author", "kernel"])
def test_an_ordinary_key_keeps_its_value(key: str) -> None:
    """Counting tokens is no secret."""
    assert log.redact(None, "info", {"event": "x", key: 7})[key] == 7


@pytest.mark.parametrize(
    "text",
    [
        f"token {TOKEN} was refused",
        f"Authorization: Bearer {TOKEN}",
        "Authorization: Basic c2VjcmV0OnZhbHVl",
        "https://name:c2VjcmV0OnZhbHVl@example.org/a?b=c",
        "HF_TOKEN=c2VjcmV0OnZhbHVl python x.py",
        "api_key: c2VjcmV0OnZhbHVl",
    ],
)
def test_secrets_inside_text_are_hidden(text: str) -> None:
    """Hub tokens, authorization values, URL userinfo and assignments do not survive."""
    clean = redacted(text)
    assert log.HIDDEN in clean
    assert TOKEN not in clean and "c2VjcmV0OnZhbHVl" not in clean


def test_the_process_own_token_is_hidden_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value of a secret variable is hidden wherever it stands, nested and in exceptions too."""
    monkeypatch.setenv("HF_TOKEN", "plain-looking-value")
    event = log.redact(
        None,
        "info",
        {
            "event": "plain-looking-value",
            "nested": {"list": ["a plain-looking-value b", {"deep": ("plain-looking-value",)}]},
            "error": RuntimeError("saw plain-looking-value"),
            "data": b"plain-looking-value",
        },
    )
    assert "plain-looking" not in repr(event)
    assert event["data"] == "<19 bytes>"


def test_cycles_end() -> None:
    """A container that holds itself is cut, not followed for ever."""
    loop: list[object] = []
    loop.append(loop)
    assert "..." in repr(log.redact(None, "info", {"event": "x", "loop": loop}))


@many_examples
@given(st.text(max_size=200))
def test_redacting_twice_changes_nothing_more(text: str) -> None:
    """Redaction is idempotent on any text."""
    once = redacted(text)
    assert redacted(once) == once
