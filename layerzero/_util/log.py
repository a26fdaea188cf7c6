"""Structured events; importing this module configures nothing and imports nothing heavy.

Events go to structlog where the application has configured it, and else to the stdlib logger "layerzero",
because unconfigured structlog prints to the stdout of a program that never asked for it. An event is a
constant `noun.past_verb`; values travel as keys. The hot path counts and never logs.
`redact` is the processor that keeps tokens and passwords out; `configure` puts it in front for the CLI, and
every event passes through it here as well, whatever the host application configured.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from functools import partial
from typing import Any, Literal, TextIO

LOGGER_NAME = "layerzero"
HIDDEN = "[hidden]"
_MAX_NESTING = 8

# A key is secret by its last word: `hf_token`, `api-key`, `Authorization`; `max_tokens` is not.
_SECRET_KEY = re.compile(
    r"(?:^|[_\-. ])(?:token|authorization|password|passwd|secret|credentials?|cookie"
    r"|(?:api|access)[_\-]?key)$",
    re.IGNORECASE,
)
_URL_USERINFO = re.compile(r"(?<=://)[^/\s@?#]{1,512}@")
_SCHEME = re.compile(r"\b(Bearer|Basic|Token)\s+[A-Za-z0-9._~+/=\-]{6,}", re.IGNORECASE)
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{8,}")
_ASSIGNED = re.compile(
    r"\b((?:[A-Z0-9_]*(?:TOKEN|SECRET|PASSWORD|API_KEY))|authorization)(\s*[=:]\s*)(?!\[hidden\])[^\s,;'\"]+",
    re.IGNORECASE,
)


def redact(logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor that hides secrets in keys, values, URLs and nested containers."""
    secrets = _environment_secrets()
    for key in list(event):
        event[key] = HIDDEN if _is_secret(key) else _clean(event[key], secrets, 0)
    return event


def configure(
    *,
    level: Literal["debug", "info", "warning", "error"] = "info",
    json: bool = False,
    stream: TextIO | None = None,
) -> None:
    """Configure structlog for a command line: redaction, level, time; console or JSON lines on `stream`.

    `stream` defaults to stderr. A library never calls this; an application that has configured structlog
    keeps its own configuration.
    """
    import structlog

    if level not in ("debug", "info", "warning", "error"):
        raise ValueError(f"level needs debug, info, warning or error, got {level!r}")
    target = sys.stderr if stream is None else stream
    renderer: Any = structlog.processors.JSONRenderer()
    if not json:
        renderer = structlog.dev.ConsoleRenderer(colors=target.isatty())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            redact,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(file=target),
        cache_logger_on_first_use=False,
    )


def _emit(method: str, event: str, /, **values: Any) -> None:
    # Importing structlog costs more than our whole import where rich is installed: only if it is in use.
    structlog = sys.modules.get("structlog")
    if structlog is not None and structlog.is_configured():
        logger = structlog.get_logger(LOGGER_NAME)
        getattr(logger, method)(event, **redact(logger, method, values))
        return
    plain = logging.getLogger(LOGGER_NAME)
    level = getattr(logging, method.upper())
    if plain.isEnabledFor(level):
        clean = redact(plain, method, values)
        plain.log(level, "%s%s", event, "".join(f" {key}={value!r}" for key, value in clean.items()))


# Each logs an event at its level: `log.info("noun.past_verb", key=value)`.
debug, info, warning, error = (partial(_emit, level) for level in ("debug", "info", "warning", "error"))


def _is_secret(key: object) -> bool:
    return isinstance(key, str) and _SECRET_KEY.search(key) is not None


def _environment_secrets() -> tuple[str, ...]:
    values = (value for name, value in os.environ.items() if _SECRET_KEY.search(name) and len(value) >= 8)
    return tuple(values)


def _clean(value: Any, secrets: tuple[str, ...], level: int) -> Any:
    if isinstance(value, str):
        return _clean_text(value, secrets)
    if value is None or isinstance(value, bool | int | float):
        return value
    if level >= _MAX_NESTING:
        return "..."
    if isinstance(value, Mapping):
        return {k: HIDDEN if _is_secret(k) else _clean(v, secrets, level + 1) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_clean(item, secrets, level + 1) for item in value]
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, BaseException):
        return _clean_text(f"{type(value).__name__}: {value}", secrets)
    return _clean_text(str(value), secrets)


def _clean_text(text: str, secrets: tuple[str, ...]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    text = _URL_USERINFO.sub(HIDDEN + "@", text)
    text = _SCHEME.sub(lambda match: f"{match.group(1)} {HIDDEN}", text)
    text = _HUB_TOKEN.sub(HIDDEN, text)
    return _ASSIGNED.sub(rf"\1\2{HIDDEN}", text)
