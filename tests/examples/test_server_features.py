"""What OpenAI's clients ask of the server, each against the same computed by hand."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.waiting import LIMIT_S

for package in ("openai", "starlette", "uvicorn", "prometheus_client", "tokenizers", "safetensors"):
    pytest.importorskip(package, reason=f"the server needs {package}: pip install 'layerzero-runtime[test]'")

import openai  # noqa: E402  the skips come first
from server import app as server_app  # noqa: E402

import layerzero as lz  # noqa: E402
from tests.examples import loopback  # noqa: E402
from tests.examples.by_hand import ByHand, penalised  # noqa: E402
from tests.examples.serving import NOTHING, PROMPT, Running, asked, client_of, serving  # noqa: E402

MESSAGES: Any = [
    {"role": "system", "content": "And it came to pass,"},
    {"role": "user", "content": "in those days"},
]
RENDERED = "And it came to pass,\nin those days"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server whose pool holds 4,096 tokens."""
    with serving(server_app.Options(pages=256)) as running:
        yield running


@pytest.fixture(scope="module")
def by_hand() -> Iterator[ByHand]:
    """The same model without a server."""
    with closing(ByHand()) as model:
        yield model


@pytest.fixture(scope="module")
def free_text(server: Running) -> str:
    """The server's likeliest 24 tokens."""
    return text_of(server, temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def free_text_by_hand(by_hand: ByHand) -> str:
    """The likeliest 20 tokens."""
    return by_hand.text(by_hand.greedy(by_hand.ids(PROMPT), 20))


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    with client_of(server) as opened:
        yield opened


def text_of(server: Running, **changes: Any) -> str:
    """The text of the one choice."""
    given_out = loopback.post(f"{server.url}/v1/completions", json=asked(**changes), timeout=LIMIT_S)
    assert given_out.status_code == 200, given_out.text
    text: str = given_out.json()["choices"][0]["text"]
    return text


# -- rules of the draw -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({}, {}),
        ({"presence_penalty": 2.0}, {"presence": 2.0}),
        ({"presence_penalty": -2.0}, {"presence": -2.0}),
        ({"frequency_penalty": 1.3}, {"frequency": 1.3}),
        ({"repetition_penalty": 1.5}, {"repetition": 1.5}),
        ({"repetition_penalty": 0.7}, {"repetition": 0.7}),
        ({"logit_bias": {"270": 4.5, "44": -100}}, {"bias": {270: 4.5, 44: -100.0}}),
        (
            {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
            {"presence": 0.6, "frequency": 0.4, "repetition": 1.2},
        ),
    ],
)  # fmt: skip
def test_rules_of_a_draw_are_the_formulas(
    server: Running, by_hand: ByHand, free_text_by_hand: str, fields: dict[str, Any], rule: dict[str, Any]
) -> None:
    """Twenty greedy tokens under each rule are those of a loop that applies the formula to every token."""
    expected = by_hand.text(by_hand.greedy(by_hand.ids(PROMPT), 20, penalised(**rule)))
    assert text_of(server, temperature=0, max_tokens=20, **fields) == expected
    assert (expected == free_text_by_hand) == (not fields)


def test_min_p_of_one_is_greedy(server: Running) -> None:
    """Only the likeliest token is left, at any temperature; so it is with top_k of one."""
    greedy = text_of(server, temperature=0, max_tokens=20)
    assert text_of(server, temperature=2, min_p=1, max_tokens=20) == greedy
    assert text_of(server, temperature=2, top_k=1, max_tokens=20) == greedy
    assert text_of(server, temperature=2, max_tokens=20) != greedy


@pytest.mark.asyncio
async def test_rules_touch_nobody_else(server: Running) -> None:
    """Requests with rules and without meet in batches, and each has the text that it has alone."""
    rules: list[dict[str, Any]] = [
        {}, {"presence_penalty": 1.0}, {"min_p": 0.2}, {"logit_bias": {"44": -50}}, {"logprobs": 3},
        {"top_k": 5}, {"repetition_penalty": 1.4, "logprobs": 0},
    ]  # fmt: skip
    requests = [asked(seed=seed, max_tokens=10, **rules[seed % len(rules)]) for seed in range(14)]
    async with loopback.AsyncClient(base_url=server.url, timeout=LIMIT_S) as client:

        async def choice(request: dict[str, Any]) -> Any:
            given_out = await client.post("/v1/completions", json=request)
            return given_out.json()["choices"][0]

        alone = [await choice(request) for request in requests]
        before = server.lanes()
        together = await asyncio.gather(*(choice(request) for request in requests))
        after = server.lanes()
    assert [one["text"] for one in together] == [one["text"] for one in alone]
    calls = sum(size * n for size, n in after.sizes.items()) - sum(s * n for s, n in before.sizes.items())
    assert calls / (after.batches - before.batches) > 4
    assert server.settled() == NOTHING


# -- log probabilities -----------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_model(by_hand: ByHand, client: openai.OpenAI) -> None:
    """Each token's and the likeliest three, before any rule; the offsets cut the text into the tokens."""
    prompt = by_hand.ids(PROMPT)
    rules: dict[str, Any] = {"temperature": 0, "presence_penalty": 1.5}
    choice = client.completions.create(**asked(max_tokens=12, logprobs=3, **rules)).choices[0]
    tokens = by_hand.greedy(prompt, 12, penalised(presence=1.5))
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert choice.text == by_hand.text(tokens)
    truth = by_hand.logprobs([*prompt, *tokens], len(prompt))
    assert choice.logprobs.token_logprobs == pytest.approx(
        [row[token] for row, token in zip(truth, tokens, strict=True)], abs=1e-4
    )
    assert choice.logprobs.top_logprobs is not None and choice.logprobs.text_offset is not None
    for row, likeliest in zip(truth, choice.logprobs.top_logprobs, strict=True):
        assert sorted(likeliest.values()) == pytest.approx(sorted(row)[-3:], abs=1e-4)
    ends = [*choice.logprobs.text_offset[1:], len(choice.text)]
    cuts = [choice.text[start:end] for start, end in zip(choice.logprobs.text_offset, ends, strict=True)]
    assert cuts == choice.logprobs.tokens


def test_a_chats_logprobs_have_bytes(by_hand: ByHand, client: openai.OpenAI) -> None:
    """The bytes of the tokens are the text; all likeliest tokens together are likely; streamed alike."""
    request: dict[str, Any] = {
        "model": "generate", "messages": MESSAGES, "max_completion_tokens": 12, "temperature": 0,
        "logprobs": True, "top_logprobs": 20,
    }  # fmt: skip
    choice = client.chat.completions.create(**request).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content
    content = choice.logprobs.content
    assert b"".join(bytes(token.bytes or []) for token in content).decode() == choice.message.content
    prompt = by_hand.ids(RENDERED)
    truth = by_hand.logprobs([*prompt, *by_hand.greedy(prompt, 12)], len(prompt))
    for row, token in zip(truth, content, strict=True):
        assert [top.logprob for top in token.top_logprobs] == pytest.approx(
            sorted(row, reverse=True)[:20], abs=1e-4
        )
        assert token.top_logprobs[0].token == token.token
    streamed: list[Any] = []
    for event in client.chat.completions.create(**request, stream=True):
        logprobs = event.choices[0].logprobs
        streamed += (logprobs.content or []) if logprobs is not None else []
    assert [token.logprob for token in streamed] == pytest.approx(
        [token.logprob for token in content], abs=1e-4
    )


def test_logprobs_end_before_a_stop_string(server: Running, client: openai.OpenAI) -> None:
    """Tokens whose text is not given are not told about."""
    free = client.completions.create(**asked(temperature=0, max_tokens=20, logprobs=0)).choices[0]
    assert free.logprobs is not None and free.logprobs.tokens is not None
    stop = "".join(free.logprobs.tokens[6:8])
    before = free.text.index(stop)
    for stream in (False, True):
        pieces: list[str] = []
        if stream:
            for event in client.completions.create(
                **asked(temperature=0, max_tokens=20, logprobs=0, stop=stop), stream=True
            ):
                part = event.choices[0].logprobs
                pieces += (part.tokens or []) if part is not None else []
        else:
            whole = client.completions.create(**asked(temperature=0, max_tokens=20, logprobs=0, stop=stop))
            assert whole.choices[0].text == free.text[:before]
            logprobs = whole.choices[0].logprobs
            pieces = (logprobs.tokens or []) if logprobs is not None else []
        assert "".join(pieces) == free.text[:before]


# -- choices, chats, usage -------------------------------------------------------------------------------


def test_choices_are_those_of_their_seeds(server: Running, client: openai.OpenAI) -> None:
    """Four choices have the texts of four requests with the following seeds, streamed or not."""
    texts = [text_of(server, seed=seed, max_tokens=10) for seed in range(3, 7)]
    assert len(set(texts)) == 4
    whole = client.completions.create(**asked(n=4, max_tokens=10))
    assert [(choice.index, choice.text) for choice in whole.choices] == list(enumerate(texts))
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (7, 40)
    streamed: dict[int, str] = {}
    counts = []
    for event in client.completions.create(
        **asked(n=4, max_tokens=10), stream=True, stream_options={"include_usage": True}
    ):
        counts.append(event.usage)
        for choice in event.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert streamed == dict(enumerate(texts))
    assert counts[-1] == whole.usage and set(counts[:-1]) == {None}
    assert server.settled() == NOTHING


def test_prompts_of_a_list_are_answered_as_each_alone(server: Running, client: openai.OpenAI) -> None:
    """Choice k of prompt i has index i * n + k and the text of that prompt alone, streamed or not."""
    prompts: list[Any] = [PROMPT, list(range(400, 440)), "In the beginning"]
    alone = [client.completions.create(**asked(prompt=prompt, n=2, max_tokens=6)) for prompt in prompts]
    texts = [choice.text for one in alone for choice in one.choices]
    many: Any = asked(prompt=[PROMPT, prompts[1], prompts[2]], n=2, max_tokens=6)
    whole = client.completions.create(**many)
    assert [(choice.index, choice.text) for choice in whole.choices] == list(enumerate(texts))
    assert whole.usage and whole.usage.prompt_tokens == sum(
        one.usage.prompt_tokens for one in alone if one.usage
    )
    assert whole.usage.completion_tokens == 36
    streamed = [""] * 6
    for event in client.completions.create(**many, stream=True):
        streamed[event.choices[0].index] += event.choices[0].text
    assert streamed == texts
    too_long = [PROMPT, [5] * 5000]
    with pytest.raises(openai.BadRequestError, match="prompt"):
        client.completions.create(**asked(prompt=too_long, max_tokens=6))
    assert server.settled() == NOTHING


def test_a_chat_takes_what_clients_send_unasked(client: openai.OpenAI) -> None:
    """`store`, `metadata` and a tier change no text; a developer speaks as the system; the tier is told."""
    chat: dict[str, Any] = {"model": "generate", "temperature": 0, "max_tokens": 8}
    words: list[Any] = [{"role": "system", "content": "Be brief."}, MESSAGES[-1]]
    plain = client.chat.completions.create(**chat, messages=words)
    assert plain.service_tier is None
    words[0] = {"role": "developer", "content": "Be brief."}
    more: dict[str, Any] = {"store": False, "metadata": {"run": "7"}, "service_tier": "auto"}
    whole = client.chat.completions.create(**chat, **more, messages=words)
    assert whole.choices[0].message.content == plain.choices[0].message.content
    events = list(client.chat.completions.create(**chat, **more, messages=words, stream=True))
    assert {whole.service_tier, *(event.service_tier for event in events)} == {"default"}
    with pytest.raises(openai.BadRequestError, match="store"):
        client.chat.completions.create(**chat, messages=words, store=True)


def test_the_last_seed_has_a_successor(server: Running, client: openai.OpenAI) -> None:
    """Seeds of further choices wrap at 64 bits."""
    choices = client.completions.create(**asked(n=2, seed=(1 << 63) - 1, max_tokens=6)).choices
    assert choices[1].text == text_of(server, seed=-(1 << 63), max_tokens=6)


def test_choices_share_their_prompt(server: Running) -> None:
    """The prompt of eight choices is computed once: the others find its full pages."""
    requests = server.service.engine.requests
    before = requests.reused_tokens
    prompt = list(range(100, 180))
    given_out = loopback.post(f"{server.url}/v1/completions", json=asked(prompt=prompt, n=8, max_tokens=4))
    assert len(given_out.json()["choices"]) == 8
    assert requests.reused_tokens - before == 7 * 64
    again = loopback.post(f"{server.url}/v1/completions", json=asked(prompt=prompt, n=8, max_tokens=4))
    assert again.json()["choices"] == given_out.json()["choices"]
    assert requests.reused_tokens - before == 15 * 64
    assert server.settled() == NOTHING


def test_a_chat_continues_its_rendered_prompt(server: Running, client: openai.OpenAI) -> None:
    """The template's text, with its own beginning of text; parts are joined; streamed or not."""
    text = text_of(server, prompt=RENDERED, temperature=0, max_tokens=16)
    chat: dict[str, Any] = {"model": "generate", "temperature": 0, "max_tokens": 16}
    halves = [{"type": "text", "text": "in those"}, {"type": "text", "text": " days"}]
    parts: list[Any] = [MESSAGES[0], {"role": "user", "content": halves}]
    prompt_tokens = len(server.service.tokenizer.encode([RENDERED])[0].ids)
    for messages in (MESSAGES, parts):
        whole: Any = client.chat.completions.create(**chat, messages=messages)
        assert (whole.object, whole.usage.prompt_tokens) == ("chat.completion", prompt_tokens)
        assert (whole.choices[0].message.role, whole.choices[0].message.content) == ("assistant", text)
    events: list[Any] = list(client.chat.completions.create(**chat, messages=MESSAGES, stream=True))
    assert {event.object for event in events} == {"chat.completion.chunk"}
    deltas = [event.choices[0].delta for event in events]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == text
    assert events[-1].choices[0].finish_reason == "length"


def test_an_answer_is_part_of_the_next_question(client: openai.OpenAI) -> None:
    """A client sends the message back as it got it, with every field that has no value."""
    first = client.chat.completions.create(model="generate", messages=MESSAGES, max_tokens=4, seed=1)
    said: Any = first.choices[0].message
    texts = []
    for back in (said, said.model_dump(), {"role": "assistant", "content": said.content}):
        messages = [*MESSAGES, back, {"role": "user", "content": "and"}]
        answer = client.chat.completions.create(model="generate", messages=messages, max_tokens=4, seed=1)
        texts.append(answer.choices[0].message.content)
    assert texts == texts[:1] * 3


def test_many_messages_are_rendered_beside_the_loop(
    server: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template takes microseconds a message: 100,000 of them would hold up everybody's tokens."""
    threads, render = list[int](), server.service.tokenizer.render

    def watched(messages: Any) -> Any:
        threads.append(threading.get_ident())
        return render(messages)

    monkeypatch.setattr(server.service.tokenizer, "render", watched)
    for count in (1, 300):
        many: Any = [{"role": "user", "content": "a"}] * count
        client.chat.completions.create(model="generate", messages=many, max_tokens=1)
    loop = server.inside(threading.get_ident)
    assert [thread == loop for thread in threads] == [True, False]


def test_a_chat_without_a_bound_ends_with_the_model(server: Running) -> None:
    """No max_tokens: the text ends by itself, or where the model has no further position."""
    body = {"model": "generate", "messages": MESSAGES, "seed": 5, "stop": ["and"]}
    given_out = loopback.post(f"{server.url}/v1/chat/completions", json=body, timeout=LIMIT_S).json()
    assert given_out["choices"][0]["finish_reason"] in ("stop", "length")
    assert given_out["usage"]["completion_tokens"] > 16 or given_out["choices"][0]["finish_reason"] == "stop"


def test_a_model_without_a_template_says_so(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """400, and the field is `messages`."""
    monkeypatch.setattr(server.service.tokenizer, "template", None)
    body = {"model": "generate", "messages": MESSAGES}
    refused = loopback.post(f"{server.url}/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    assert "chat template" in refused.json()["error"]["message"]


def test_what_a_template_refuses_is_a_400(server: Running) -> None:
    """A role that it does not know is one."""
    body = {"model": "generate", "messages": [{"role": "tool", "content": "a"}]}
    refused = loopback.post(f"{server.url}/v1/chat/completions", json=body)
    assert refused.status_code == 400 and "role needs" in refused.json()["error"]["message"]


def test_a_prompt_of_another_tokenizer_is_refused(server: Running) -> None:
    """By the digest that /v1/models tells, with the reason's code; before, equal prompts are found again."""
    (served,) = loopback.get(f"{server.url}/v1/models").json()["data"]
    assert served["tokenizer"] == server.service.tokenizer.identity.digest
    url, hits = f"{server.url}/v1/completions", server.service.prompts.stats().hits
    texts = [loopback.post(url, json=asked(tokenizer=served["tokenizer"])).json() for _ in range(2)]
    assert texts[0]["choices"] == texts[1]["choices"]
    assert server.service.prompts.stats().hits > hits
    for prompt in ([5, 6], "text"):
        refused = loopback.post(url, json=asked(prompt=prompt, tokenizer="0" * 64))
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["param"], error["code"]) == ("tokenizer", "TOKENIZER_MISMATCH")
    assert server.settled() == NOTHING


def test_an_end_of_the_text_ends_it_unless_it_is_ignored(server: Running) -> None:
    """A token that ends the text has no text of its own, and is counted; ignored, it is one like others."""
    url = f"{server.url}/v1/completions"
    ended = loopback.post(url, json=asked(logit_bias={"1": 100}, max_tokens=9)).json()
    assert (ended["choices"][0]["text"], ended["choices"][0]["finish_reason"]) == ("", "stop")
    assert ended["usage"]["completion_tokens"] == 1
    ignored = loopback.post(url, json=asked(logit_bias={"1": 100}, max_tokens=9, ignore_eos=True)).json()
    assert ignored["choices"][0]["finish_reason"] == "length"
    assert ignored["usage"]["completion_tokens"] == 9


# -- stop strings ----------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(start=st.integers(0, 70), size=st.integers(1, 14), stream=st.booleans())
def test_a_stop_string_anywhere_ends_the_text_before_it(
    server: Running, free_text: str, start: int, size: int, stream: bool
) -> None:
    """Any piece of the text it would have given, however tokens cut it: nothing of it is ever sent."""
    stop = free_text[start % len(free_text) :][:size]
    expected = free_text[: free_text.index(stop)]
    request = asked(temperature=0, max_tokens=24, stop=[stop], stream=stream)
    with loopback.stream("POST", f"{server.url}/v1/completions", json=request) as response:
        if not stream:
            response.read()
            choice = response.json()["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
            return
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    sent = ""
    for line in lines:
        sent += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        assert expected.startswith(sent)
    assert sent == expected


# -- grammars --------------------------------------------------------------------------------------------

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_a_schema_shapes_the_answer(client: openai.OpenAI) -> None:
    """Every answer that ends is JSON of the schema, whatever the seed, in a chat and as a completion."""
    pytest.importorskip(
        "llguidance", reason="grammars need llguidance: pip install 'layerzero-runtime[grammar]'"
    )
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    ended = 0
    for seed in range(6):
        answer = client.chat.completions.create(
            model="generate", messages=MESSAGES, max_tokens=60, seed=seed, response_format=form
        )
        choice = answer.choices[0]
        if choice.finish_reason == "stop":
            ended += 1
            value = json.loads(choice.message.content or "")
            assert set(value) == {"name", "age"} and type(value["age"]) is int
    assert ended
    body = client.completions.create(
        **asked(max_tokens=80), extra_body={"response_format": {"type": "json_object"}}
    )
    assert body.choices[0].text.startswith("{")


@pytest.mark.parametrize("pattern", ["[a-c]{3,5}-[0-9]{2}", "(yes|no)", "\u4e2d+\u00e9"])
def test_a_pattern_shapes_the_answer(server: Running, pattern: str) -> None:
    """What is given matches the whole pattern, at any temperature and beside penalties."""
    pytest.importorskip(
        "llguidance", reason="grammars need llguidance: pip install 'layerzero-runtime[grammar]'"
    )
    for seed in range(4):
        request = asked(seed=seed, temperature=2, max_tokens=60, presence_penalty=1)
        request["structured_outputs"] = {"regex": pattern}
        given_out = loopback.post(f"{server.url}/v1/completions", json=request).json()["choices"][0]
        if given_out["finish_reason"] == "stop":
            assert re.fullmatch(pattern, given_out["text"])
    assert re.fullmatch("(yes|no)", given_out["text"]) or pattern != "(yes|no)"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "a(b"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"type": "strin"}}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"enum": ["a" * 65_536]}}}, "structured_outputs"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"$ref": "#/x"}},
                }
            },
            "response_format",
        ),
    ],
)
def test_a_grammar_that_cannot_be_is_named(server: Running, fields: dict[str, Any], param: str) -> None:
    """400 with the field, before anything runs."""
    pytest.importorskip(
        "llguidance", reason="grammars need llguidance: pip install 'layerzero-runtime[grammar]'"
    )
    refused = loopback.post(f"{server.url}/v1/completions", json=asked(**fields))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert len(refused.content) < 500
    assert server.settled() == NOTHING


TOO_MUCH = {"json": {"type": "string", "pattern": "^(a+)+$", "minLength": 3000}}


@pytest.mark.parametrize("constraint", [{"regex": "[^\\s\\S]"}, {"json": {"$ref": "#"}}, TOO_MUCH])
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_cannot_be_followed_is_named(
    server: Running, constraint: dict[str, Any], stream: bool
) -> None:
    """A grammar of no text, and one beyond its library's limits: the request is wrong, not the server."""
    pytest.importorskip(
        "llguidance", reason="grammars need llguidance: pip install 'layerzero-runtime[grammar]'"
    )
    refused = loopback.post(
        f"{server.url}/v1/completions", json=asked(structured_outputs=constraint, stream=stream)
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "structured_outputs")
    assert "the grammar cannot be followed" in refused.json()["error"]["message"]
    assert server.settled() == NOTHING


def test_a_grammar_that_ends_a_stream_says_so(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits can be met behind any token: the stream ends with an error event and without `[DONE]`."""
    llguidance = pytest.importorskip(
        "layerzero.integrations.llguidance", reason="grammars need llguidance", exc_type=ImportError
    )
    accept = llguidance.Grammar.accept
    accepted = 0

    def limited(grammar: Any, token: int) -> None:
        nonlocal accepted
        accepted += 1
        if accepted > 3:
            raise lz.GrammarLimitError("the grammar cannot be followed: too many expressions")
        accept(grammar, token)

    monkeypatch.setattr(llguidance.Grammar, "accept", limited)
    answer = loopback.post(
        f"{server.url}/v1/completions", json=asked(structured_outputs={"regex": "[a-z ]{40}"}, stream=True)
    )
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert [("error" in json.loads(event)) for event in events] == [False] * 3 + [True]
    assert server.settled() == NOTHING


def test_choices_share_one_compiled_grammar(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling can take a second: four choices cost one, and each follows it on its own."""
    pytest.importorskip(
        "llguidance", reason="grammars need llguidance: pip install 'layerzero-runtime[grammar]'"
    )
    compiled, make = list[Any](), server.service._compile

    def watched(what: Any) -> Any:
        compiled.append(what)
        return make(what)

    monkeypatch.setattr(server.service, "_compile", watched)
    request = asked(structured_outputs={"regex": "[a-c]{3,5}-[0-9]{2}"}, n=4, max_tokens=20)
    choices = loopback.post(f"{server.url}/v1/completions", json=request).json()["choices"]
    assert len(compiled) == 1
    assert all(re.fullmatch("[a-c]{3,5}-[0-9]{2}", choice["text"]) for choice in choices)


def test_a_missing_grammar_library_is_named(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """400 that says what to install."""
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.delitem(sys.modules, "layerzero.integrations.llguidance", raising=False)
    monkeypatch.setattr(server.service, "_grammars", None)
    refused = loopback.post(f"{server.url}/v1/completions", json=asked(structured_outputs={"regex": "a"}))
    assert refused.status_code == 400
    assert "layerzero-runtime[grammar]" in refused.json()["error"]["message"]


def test_a_user_waits_as_itself(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose turn it is goes by the `user` of a request, for each of its choices."""
    requests = server.service.engine.requests
    clients: list[str] = []
    opened = requests.open

    def noted(client: str) -> Any:
        clients.append(client)
        return opened(client)

    monkeypatch.setattr(requests, "open", noted)
    text_of(server, user="somebody", n=2, max_tokens=2)
    text_of(server, max_tokens=2)
    assert clients == ["somebody", "somebody", ""]


# -- pages and lanes -------------------------------------------------------------------------------------


def test_a_prefix_is_found_by_its_content(server: Running, by_hand: ByHand) -> None:
    """A prompt whose beginning was asked before: the same tokens as from an empty cache, in fewer rows."""
    prompt = by_hand.ids("And it came to pass in those days, that there went out a decree from Caesar " * 2)
    requests = server.service.engine.requests
    expected = [
        by_hand.text(by_hand.greedy(asked_for, 12)) for asked_for in (prompt, [*prompt[:40], *prompt[9:30]])
    ]
    for _ in range(2):
        before = requests.reused_tokens
        texts = [
            text_of(server, prompt=tokens, temperature=0, max_tokens=12)
            for tokens in (prompt, [*prompt[:40], *prompt[9:30]])
        ]
        assert texts == expected
    assert requests.reused_tokens - before >= 64
    assert server.settled() == NOTHING


def test_a_full_lane_in_the_middle_is_waited_out(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client in mid-stream never sees it; before the first token it is a 429."""
    free = text_of(server, max_tokens=8)
    sample_next = server.service.model.sample_next
    calls = 0

    async def sometimes_full(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in full_at:
            raise lz.OverloadedError("the lane is full", retry_after=0.01)
        return await sample_next(*args)

    monkeypatch.setattr(server.service.model, "sample_next", sometimes_full)
    full_at = {3, 4, 7}
    assert text_of(server, max_tokens=8) == free
    calls, full_at = 0, {1}
    refused = loopback.post(f"{server.url}/v1/completions", json=asked())
    assert refused.status_code == 429
    assert server.settled() == NOTHING


def test_a_client_that_leaves_takes_all_its_choices(server: Running) -> None:
    """Eight choices in mid-stream: pages, calls and tasks are gone with the connection."""
    request = asked(n=8, max_tokens=400, stream=True)
    with loopback.stream("POST", f"{server.url}/v1/completions", json=request, timeout=LIMIT_S) as response:
        lines = response.iter_lines()
        for _ in range(20):
            next(lines)
    assert server.settled() == NOTHING


def test_an_error_in_one_choice_ends_the_request(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """500, and the other choices leave nothing behind."""
    sample_next = server.service.model.sample_next
    calls = 0

    async def broken(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise RuntimeError("a secret of the inside")
        return await sample_next(*args)

    monkeypatch.setattr(server.service.model, "sample_next", broken)
    given_out = loopback.post(f"{server.url}/v1/completions", json=asked(n=4, max_tokens=40))
    assert given_out.status_code == 500 and "secret" not in given_out.text
    assert server.settled() == NOTHING
