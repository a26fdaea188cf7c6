"""What a request may ask: fields of OpenAI's API that this server honours, and vLLM's beside them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from server.fields import (
    BadRequest,
    Reader,
    UnknownModel,
    boolean,
    brief,
    integer,
    keyed,
    nothing,
    number,
    strings,
    text,
)

MAX_CHOICES, MAX_TOP_LOGPROBS, MAX_BIASES = 16, 20, 1024
MAX_ANSWERS = 128  # choices of all prompts of one request
_SEED = 1 << 63
# What a message of an answer has beside its text, and clients send back.
_ANSWERED = {"refusal", "annotations", "audio", "function_call", "tool_calls"}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; the same seed draws the same tokens in any company."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = field(default_factory=lambda: random.getrandbits(62))
    top_logprobs: int | None = None

    @property
    def has_rules(self) -> bool:
        """Whether a token needs more than a draw from the model's own logits."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        asked = penalties != (1.0, 0.0, 0.0) or self.logit_bias or self.min_p
        return bool(asked) or self.top_logprobs is not None


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a text has to be: JSON of a schema, or what a regular expression matches; `param` asked for it."""

    param: str
    schema: dict[str, Any] | None = None
    regex: str | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: prompts as text or as token ids, or messages, and how to answer them.

    `choices` is how many each prompt has; `service_tier` is the tier, where one is asked for.
    """

    is_chat: bool
    prompts: list[str | list[int]]
    messages: list[dict[str, Any]]
    sampling: Sampling
    max_tokens: int | None
    choices: int
    stop: tuple[str, ...]
    constraint: Constraint | None
    stream: bool
    include_usage: bool
    ignore_eos: bool
    user: str
    tokenizer: str | None = None  # the digest that the prompt's tokens are meant by
    service_tier: str | None = None

    @property
    def answers(self) -> int:
        """Choices of all prompts."""
        return self.choices * max(1, len(self.prompts))


_SAMPLING: dict[str, Reader] = {
    "temperature": number(0, 2),
    "top_p": number(0, 1, above=True),
    "top_k": integer(0, 1 << 31),
    "min_p": number(0, 1),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(0.01, 100),
    "seed": integer(-_SEED, _SEED - 1),
}


def _options(name: str, value: Any) -> bool:
    options = keyed(name, value, {"include_usage", "include_obfuscation"})
    nothing(False, None)(name, options.get("include_obfuscation"))  # events are not padded
    usage = options.get("include_usage")
    return usage is not None and boolean(name, usage)


def _biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise BadRequest(
            f"{name} needs an object of at most {MAX_BIASES} token ids, got {brief(value)}", name
        )
    biases = []
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise BadRequest(f"{name} needs token ids as keys, got {brief(key)}", name)
        biases.append((int(key), number(-100, 100)(name, bias)))
    return tuple(biases)


def _format(name: str, value: Any) -> Constraint | None:
    kind = keyed(name, value, {"type", "json_schema"}, {"type"})["type"]
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint(name, schema={"type": "object"})
    if kind == "json_schema":
        known = {"name", "schema", "strict", "description"}
        described = keyed(name, value.get("json_schema"), known, {"schema"})
        return Constraint(name, schema=_schema(name, described["schema"]))
    raise BadRequest(f"{name} needs a type among text, json_object and json_schema, got {brief(kind)}", name)


def _structure(name: str, value: Any) -> Constraint:
    asked = keyed(name, value, {"json", "regex"})
    if len(asked) != 1:
        raise BadRequest(f"{name} needs one of json and regex, got {brief(sorted(asked))}", name)
    if "regex" in asked:
        return Constraint(name, regex=text(name, asked["regex"]))
    return Constraint(name, schema=_schema(name, asked["json"]))


def _schema(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{name} needs a schema that is an object, got {brief(value)}", name)
    return value


def _prompts(name: str, value: Any) -> list[str | list[int]]:
    """One prompt or a list of them."""
    several = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    if len(several) > MAX_ANSWERS:
        raise BadRequest(f"{name} needs at most {MAX_ANSWERS} prompts, got {len(several)}", name)
    return [_prompt(name, one) for one in several]


def _prompt(name: str, value: Any) -> str | list[int]:
    """One prompt, as text or as token ids."""
    if isinstance(value, str):
        return text(name, value)
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return value
    raise BadRequest(f"{name} needs strings, or lists of token ids, got {brief(value)}", name)


def _messages(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise BadRequest(f"{name} needs a list of at least one message, got {brief(value)}", name)
    return [_message(name, message) for message in value]


def _message(name: str, message: Any) -> dict[str, Any]:
    if isinstance(message, dict):  # an answer that comes back as it was given has fields of no value
        message = {key: value for key, value in message.items() if value is not None or key not in _ANSWERED}
    known = keyed(name, message, {"role", "content", "name"}, {"role", "content"})
    content = known["content"]
    if isinstance(content, list):  # parts, all of them text
        parts = [keyed(name, part, {"type", "text"}, {"type", "text"}) for part in content]
        if any(part["type"] != "text" for part in parts):
            raise BadRequest(f"{name} needs parts of type text, got {brief(content)}", name)
        content = "".join(text(name, part["text"]) for part in parts)
    texts = {key: text(name, part) for key, part in (known | {"content": content}).items()}
    # What newer clients call the system: templates know it by its old name.
    if texts["role"] == "developer":
        texts["role"] = "system"
    return texts


def _metadata(name: str, value: Any) -> None:
    """At most 16 pairs of short strings, which belong to a stored answer: nothing is stored here."""
    if not isinstance(value, dict) or len(value) > 16:
        raise BadRequest(f"{name} needs an object of at most 16 strings, got {brief(value)}", name)
    for key, string in value.items():
        if len(text(name, key)) > 64 or len(text(name, string)) > 512:
            raise BadRequest(f"{name} needs keys of 64 characters and values of 512, got {brief(key)}", name)


def _tier(name: str, value: Any) -> str:
    """The one tier that there is, by its name or left to the server."""
    if value not in ("auto", "default"):
        raise BadRequest(f"{name} needs auto or default, got {brief(value)}", name)
    return "default"


_COMMON: dict[str, Reader] = {
    **_SAMPLING,
    "model": lambda name, value: value,
    "max_tokens": integer(1, 1 << 31),
    "logit_bias": _biases,
    "n": integer(1, MAX_CHOICES),
    "stop": strings(4),
    "stream": boolean,
    "stream_options": _options,
    "response_format": _format,
    "structured_outputs": _structure,
    "ignore_eos": boolean,
    "user": text,
    "tokenizer": text,
}
_COMPLETION: dict[str, Reader] = {
    **_COMMON,
    "prompt": _prompts,
    "logprobs": integer(0, MAX_TOP_LOGPROBS),
    "best_of": integer(1, MAX_CHOICES),
    "echo": nothing(False),
    "suffix": nothing(""),
}
_CHAT: dict[str, Reader] = {
    **_COMMON,
    "messages": _messages,
    "max_completion_tokens": integer(1, 1 << 31),
    "logprobs": boolean,
    "top_logprobs": integer(0, MAX_TOP_LOGPROBS),
    "tools": nothing([]),
    "tool_choice": nothing("none"),
    "parallel_tool_calls": boolean,
    "modalities": nothing(["text"]),
    "prompt_cache_key": text,  # prompts are found by what is in them
    "safety_identifier": text,
    "store": nothing(False),
    "metadata": _metadata,
    "service_tier": _tier,
    "audio": nothing(),
    "functions": nothing([]),
    "function_call": nothing("none"),
    "prediction": nothing(),
    "reasoning_effort": nothing("none"),
    "verbosity": nothing(),
    "web_search_options": nothing(),
}


def read(body: bytes, served: str, *, chat: bool = False) -> Ask:
    """The request in `body`, for the model that is `served`.

    Raises: BadRequest: the body is no JSON object, or a field cannot be honoured; the message names it.
        UnknownModel: `model` names another one.
    """
    fields = _object(body)
    readers = _CHAT if chat else _COMPLETION
    for name in fields:
        if name not in readers:
            param = name.encode("utf-8", "backslashreplace").decode()
            raise BadRequest(f"unknown field {brief(name)}", param)
    _need_model(fields.get("model"), served)
    values = {name: readers[name](name, value) for name, value in fields.items() if value is not None}
    prompt = values.get("messages" if chat else "prompt")
    if prompt is None:
        name = "messages" if chat else "prompt"
        raise BadRequest(f"{name} needs a value, got none", name)
    stream = values.get("stream", False)
    if fields.get("stream_options") and not stream:
        raise BadRequest("stream_options needs stream to be true", "stream_options")
    choices = values.get("n", 1)
    if values.get("best_of", choices) != choices:
        raise BadRequest(f"best_of needs to be n, {choices}, got {values['best_of']}", "best_of")
    if not chat and len(prompt) * choices > MAX_ANSWERS:
        raise BadRequest(
            f"prompt needs at most {MAX_ANSWERS} choices, n of each, got {len(prompt)} and {choices}",
            "prompt",
        )
    if "response_format" in values and "structured_outputs" in values:
        raise BadRequest("structured_outputs needs to be without response_format", "structured_outputs")
    return Ask(
        is_chat=chat,
        prompts=[] if chat else prompt,
        messages=prompt if chat else [],
        sampling=_sampling(values, chat),
        max_tokens=_max_tokens(values, chat),
        choices=choices,
        stop=values.get("stop", ()),
        constraint=values.get("response_format") or values.get("structured_outputs"),
        stream=stream,
        include_usage=values.get("stream_options", False),
        ignore_eos=values.get("ignore_eos", False),
        user=values.get("user", values.get("safety_identifier", "")),
        tokenizer=values.get("tokenizer"),
        service_tier=values.get("service_tier"),
    )


def _need_model(model: Any, served: str) -> None:
    if not isinstance(model, str):
        raise BadRequest(f"model needs a string, {served!r}, got {brief(model)}", "model")
    if model != served:
        raise UnknownModel(f"model needs {served!r}, got {brief(model)}", "model")


def _sampling(values: dict[str, Any], chat: bool) -> Sampling:
    asked = {name: values[name] for name in (*_SAMPLING, "logit_bias") if name in values}
    top: int | None = values.get("logprobs")
    if chat:
        if "top_logprobs" in values and not values.get("logprobs"):
            raise BadRequest("top_logprobs needs logprobs to be true", "top_logprobs")
        top = values.get("top_logprobs", 0) if values.get("logprobs") else None
    return Sampling(**asked, top_logprobs=top)


def _max_tokens(values: dict[str, Any], chat: bool) -> int | None:
    """How many tokens may be drawn: 16 for a completion, as long as the model goes for a chat."""
    if "max_tokens" in values and "max_completion_tokens" in values:
        raise BadRequest("max_completion_tokens needs to be without max_tokens", "max_completion_tokens")
    asked: int | None = values.get("max_completion_tokens", values.get("max_tokens", None if chat else 16))
    return asked


def _object(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except ValueError as error:
        raise BadRequest(f"the body needs to be JSON: {error}") from error
    except RecursionError as error:
        raise BadRequest("the body needs to be JSON that is not nested so deeply") from error
    if not isinstance(fields, dict):
        raise BadRequest(f"the body needs to be a JSON object, got {type(fields).__name__}")
    return fields
