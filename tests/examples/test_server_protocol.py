"""What a request may say: every field that is honoured, and every way to say it wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

for package in ("safetensors", "tokenizers"):
    pytest.importorskip(package, reason=f"the server needs {package}: pip install 'layerzero-runtime[test]'")

from server.fields import BadRequest, UnknownModel  # noqa: E402  the skips come first
from server.protocol import Ask, Constraint, read  # noqa: E402

MESSAGES = [{"role": "user", "content": "a"}]
SCHEMA = {"type": "object"}


def asked(chat: bool = False, **fields: Any) -> Ask:
    """A request with `fields` beside what every one needs."""
    needed: dict[str, Any] = {"model": "m", "messages": MESSAGES} if chat else {"model": "m", "prompt": "a"}
    return read(json.dumps(needed | fields).encode(), "m", chat=chat)


def test_what_is_asked_arrives() -> None:
    """Each field of both endpoints, under the name that the engine knows it by."""
    rules = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": -1,
        "frequency_penalty": 1.5, "repetition_penalty": 1.2, "seed": -3,
    }  # fmt: skip
    for chat in (False, True):
        logprobs = {"logprobs": True, "top_logprobs": 4} if chat else {"logprobs": 4}
        ask = asked(
            chat, **rules, **logprobs, logit_bias={"5": -100, "0": 1}, n=3, stop=["x", "y"], stream=True,
            stream_options={"include_usage": True}, user="u", max_tokens=9,
            structured_outputs={"regex": "a+"},
        )  # fmt: skip
        assert {name: getattr(ask.sampling, name) for name in rules} == rules
        assert ask.sampling.logit_bias == ((5, -100.0), (0, 1.0)) and ask.sampling.top_logprobs == 4
        assert (ask.is_chat, ask.choices, ask.stop, ask.user) == (chat, 3, ("x", "y"), "u")
        assert (ask.stream, ask.include_usage, ask.max_tokens) == (True, True, 9)
        assert ask.constraint == Constraint("structured_outputs", regex="a+")


def test_what_clients_send_without_being_asked_is_taken() -> None:
    """Nothing is stored, and there is one tier; a developer is what a template calls the system."""
    ask = asked(
        True, store=False, metadata={"a": "b"}, service_tier="auto",
        messages=[{"role": "developer", "content": "a"}, {"role": "user", "content": "developer"}],
    )  # fmt: skip
    assert [message["role"] for message in ask.messages] == ["system", "user"]
    assert ask.service_tier == "default" and asked(True, metadata=None, store=None).service_tier is None


def test_what_asks_for_nothing_more_is_taken() -> None:
    """As many answers as candidates; text and nothing else; no padding; an end user by its new name."""
    assert asked(best_of=3, n=3).choices == 3 and asked(best_of=1).choices == 1
    for chat in (False, True):
        options = {"include_usage": True, "include_obfuscation": False}
        assert asked(chat, stream=True, stream_options=options).include_usage
    ask = asked(
        True, modalities=["text"], parallel_tool_calls=True, prompt_cache_key="k", safety_identifier="s"
    )  # fmt: skip
    assert ask.user == "s" and asked(True, safety_identifier="s", user="u").user == "u"
    for name in ABSENT:
        assert asked(True, **{name: None}).is_chat
    assert asked(True, functions=[], function_call="none", reasoning_effort="none", stream=True,
                 stream_options={"include_usage": None}).include_usage is False  # fmt: skip


def test_a_list_of_prompts_is_several() -> None:
    """Texts and lists of ids, mixed or not; a list of ids alone is one prompt."""
    for prompt, prompts in (
        (["a", "b"], ["a", "b"]), ([[1, 2], [3]], [[1, 2], [3]]), (["a", [3]], ["a", [3]]),
        ("a", ["a"]), ([1, 2], [[1, 2]]), ([[1, 2]], [[1, 2]]),
    ):  # fmt: skip
        ask = asked(prompt=prompt, n=3)
        assert (ask.prompts, ask.choices, ask.answers) == (prompts, 3, 3 * len(prompts))


def test_what_is_not_asked_is_the_apis_default() -> None:
    """16 tokens for a completion and no bound for a chat; nothing else is asked; seeds differ."""
    ask, chat = asked(), asked(True)
    assert (ask.max_tokens, chat.max_tokens, ask.choices, ask.stop) == (16, None, 1, ())
    assert not ask.sampling.has_rules and ask.sampling.temperature == 1
    assert ask.sampling.seed != chat.sampling.seed
    assert asked(True, logprobs=True).sampling.top_logprobs == 0
    assert asked(True, logprobs=False).sampling.top_logprobs is None
    assert asked(logprobs=0).sampling.has_rules
    assert asked(temperature=None, n=None, stop=None, logit_bias=None).choices == 1


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}, SCHEMA),
    ],
)
def test_a_format_is_a_schema(form: dict[str, Any], schema: Any) -> None:
    """Text constrains nothing."""
    constraint = asked(True, response_format=form).constraint
    assert (constraint and constraint.schema) == schema


# Fields of OpenAI's chats that ask for what is not here; clients send them empty.
ABSENT = (
    "audio", "function_call", "functions", "prediction", "reasoning_effort", "verbosity",
    "web_search_options",
)  # fmt: skip
BOTH: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": None}}, "logit_bias"),
    ({"logit_bias": {"\u0663": 1}}, "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ({"seed": 1 << 63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"chunks": 1}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 0}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
    ({"user": 7}, "user"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format"),
    ({"response_format": {"type": "json_object", "more": 1}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{}"}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "a"}}, "structured_outputs"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
    ),
    ({"beam": 4}, "beam"),
]
COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": ["a", [5]], "n": "2"}, "n"),
    ({"prompt": [[5], []]}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a"] * 9, "n": 15}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"store": False}, "store"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"echo": True}, "echo"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": True}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"modalities": ["text"]}, "modalities"),
    ({"suffix": "x"}, "suffix"),
    ({"messages": MESSAGES}, "messages"),
]
CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ["a"]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": []}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "messages"),
    ({"logprobs": 2}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 3}, "max_completion_tokens"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"prompt_cache_key": 5}, "prompt_cache_key"),
    ({"safety_identifier": ["a"]}, "safety_identifier"),
    ({"store": True}, "store"),
    ({"store": 0}, "store"),
    ({"metadata": ["a"]}, "metadata"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {"a" * 65: "b"}}, "metadata"),
    ({"metadata": {"a": "b" * 513}}, "metadata"),
    ({"metadata": {str(key): "b" for key in range(17)}}, "metadata"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"service_tier": ["auto"]}, "service_tier"),
    ({"prompt": "a"}, "prompt"),
    *[({name: "high"}, name) for name in ABSENT],
    ({"functions": [{"name": "f"}]}, "functions"),
]
REFUSED = [(chat, *row) for chat in (False, True) for row in (*BOTH, *(CHAT if chat else COMPLETION))]


@pytest.mark.parametrize(("chat", "fields", "param"), REFUSED)
def test_what_cannot_be_honoured_is_named(chat: bool, fields: dict[str, Any], param: str) -> None:
    """The error names the field, and its message begins with it, or says that it is unknown."""
    with pytest.raises(BadRequest) as refused:
        asked(chat, **fields)
    assert refused.value.param == param and not isinstance(refused.value, UnknownModel)
    assert str(refused.value).startswith((param, "unknown field")) and param in str(refused.value)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("chat", [False, True])
def test_another_model_is_another_error(chat: bool) -> None:
    """404 with OpenAI's code."""
    with pytest.raises(UnknownModel) as refused:
        asked(chat, model="gpt-9")
    assert (refused.value.status, refused.value.code, refused.value.param) == (
        404,
        "model_not_found",
        "model",
    )
    with pytest.raises(BadRequest, match="model needs a string"):
        asked(chat, model=None)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
NAMES = [
    "temperature", "top_k", "logit_bias", "seed", "n", "stop", "stream", "stream_options", "response_format",
    "structured_outputs", "user", "prompt", "messages", "logprobs", "top_logprobs", "max_tokens", "tools",
    "store", "metadata", "service_tier", "best_of", "modalities", "safety_identifier",
]  # fmt: skip


@given(st.booleans(), st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4))
def test_no_value_is_more_than_refused(chat: bool, fields: dict[str, Any]) -> None:
    """Whatever JSON a field holds, it is read or refused by name; never another error."""
    try:
        ask = asked(chat, **fields)
    except BadRequest as refused:
        assert refused.param in fields or refused.param in ("messages", "prompt")
    else:
        assert ask.choices >= 1
