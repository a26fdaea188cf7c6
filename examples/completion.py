"""What a completion request may ask: the fields of OpenAI's API that this server honours."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from generate import SamplingParams


class BadRequest(Exception):
    """The request cannot be served as it is; `param` names the field."""

    status = 400
    code: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownModel(BadRequest):
    """Another model is asked for than the one that is served."""

    status = 404
    code = "model_not_found"


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A completion request: the prompt as text or as token ids, and how to answer."""

    text: str
    ids: list[int] | None
    sampling: SamplingParams
    stream: bool
    include_usage: bool


# Fields that are understood only where they ask for nothing: field -> values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "logprobs": (), "suffix": ("",),
    "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},),
}  # fmt: skip
_KNOWN = {
    "model", "prompt", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "stream_options",
    "user", *_NEUTRAL,
}  # fmt: skip


def read(body: bytes, served: str) -> CompletionRequest:
    """The request in `body`, for the model that is `served`.

    Raises: BadRequest: the body is no JSON object, or a field cannot be honoured; the message names it.
        UnknownModel: `model` names another one.
    """
    fields = _object(body)
    model = fields.get("model")
    if not isinstance(model, str):
        raise BadRequest(f"model needs a string, {served!r}, got {_brief(model)}", "model")
    if model != served:
        raise UnknownModel(f"model needs {served!r}, got {_brief(model)}", "model")
    text, ids = _prompt(fields.get("prompt"))
    stream = _bool(fields, "stream")
    return CompletionRequest(
        text, ids, _sampling(fields), stream, _include_usage(fields.get("stream_options"), stream)
    )


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict) or (options and not stream):
        raise BadRequest("stream_options needs an object, and stream to be true", "stream_options")
    include = options.get("include_usage", False)
    if options.keys() - {"include_usage"} or not isinstance(include, bool):
        raise BadRequest("stream_options needs include_usage, true or false, alone", "stream_options")
    return include


def _object(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except ValueError as error:
        raise BadRequest(f"the body needs to be JSON: {error}") from error
    except RecursionError as error:
        raise BadRequest("the body needs to be JSON that is not nested so deeply") from error
    if not isinstance(fields, dict):
        raise BadRequest(f"the body needs to be a JSON object, got {type(fields).__name__}")
    for name, value in fields.items():
        if name not in _KNOWN:
            raise BadRequest(
                f"unknown field {_brief(name)}", name.encode("utf-8", "backslashreplace").decode()
            )
        if name in _NEUTRAL and value is not None and not _asks_nothing(value, _NEUTRAL[name]):
            raise BadRequest(f"{name} is not supported, got {_brief(value)}", name)
    return fields


def _asks_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether `value` is one of `neutral`; True is no 1, and False no 0."""
    return any(
        value == neutral_value and isinstance(value, bool) == isinstance(neutral_value, bool)
        for neutral_value in neutral
    )


def _brief(value: Any) -> str:
    """What was given, as it goes into a message."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _prompt(prompt: Any) -> tuple[str, list[int] | None]:
    """One prompt, as text or as token ids; a list of one of those is that one."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _whole(prompt, "prompt"), None
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return "", prompt
    raise BadRequest("prompt needs one string or one list of token ids", "prompt")


def _whole(text: str, name: str) -> str:
    """`text`, unless it has half a character, which JSON can spell and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"{name} needs whole characters, got half a pair at {error.start}", name) from error
    return text


def _sampling(fields: dict[str, Any]) -> SamplingParams:
    values: dict[str, Any] = {}
    for name, kinds in (
        ("max_tokens", int),
        ("seed", int),
        ("temperature", int | float),
        ("top_p", int | float),
    ):
        value = fields.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise BadRequest(f"{name} needs a number, got {_brief(value)}", name)
        try:
            values[name] = value if kinds is int else float(value)
        except OverflowError as error:
            raise BadRequest(f"{name} needs a number that a float can hold", name) from error
    stop = fields.get("stop")
    if stop is not None:
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(word, str) for word in stops):
            raise BadRequest(f"stop needs a string or a list of strings, got {_brief(stop)}", "stop")
        values["stop"] = tuple(_whole(word, "stop") for word in stops)
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise BadRequest(str(error), str(error).split()[0]) from error


def _bool(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{name} needs true or false, got {_brief(value)}", name)
    return bool(value)
