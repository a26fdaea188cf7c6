"""Messages into prompts: the templates of model folders, in a sandbox."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import layerzero as lz
from layerzero.spec.errors import ConfigurationError
from layerzero.tokenization import sources, templates
from layerzero.tokenization.sources import load_template
from layerzero.tokenization.tokenizer import Tokenizer
from tests.tokenization.made import encoding, processor, trained

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "naïve <|end|>"},
    {"role": "user", "content": "hello"},
]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'stop' %}{% break %}{% endif %}<|user|>{{ m.content }}<|end|>"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture(scope="module", autouse=True)
def opened() -> None:
    """The CPU's device, opened outside of a loop: probing it reads files."""
    lz.sync.rms_norm(torch.ones(1, 8))


def test_a_chat_is_its_rendered_text_with_special_tokens_read() -> None:
    """Awaited and blocking, with tools and without a beginning of an answer; the cache finds it again."""
    tokenizer = Tokenizer(encoding(), chat_template=lz.ChatTemplate(TEMPLATE), cache=lz.PromptCache())
    every: list[dict[str, Any]] = [{}, {"tools": [{"name": "é"}]}, {"add_generation_prompt": False}]
    text = ""
    for options in every:
        text = tokenizer.render(MESSAGES, **options)
        right = encoding().encode(text, allowed_special="all")

        async def go(how: dict[str, Any] = options) -> lz.Tokens:
            return await lz.tokenize_chat(MESSAGES, tokenizer, **how)

        assert anyio.run(go).ids.tolist() == anyio.run(go).ids.tolist() == right
        assert tokenizer.encode_chat(MESSAGES, **options).ids.tolist() == right
    assert tokenizer.cache is not None and tokenizer.cache.stats().hits == 3
    assert text.endswith("hello<|end|>") and '[{"name": "é"}]' in tokenizer.render(
        MESSAGES, tools=[{"name": "é"}]
    )


def test_control_pieces_of_sentencepiece_are_read_in_a_chat() -> None:
    """A prompt that begins with <s> begins with its id, once."""
    template = lz.ChatTemplate("{{ bos_token }}{{ messages[0].content }}</s>", {"bos_token": "<s>"})
    tokenizer = Tokenizer(processor(), chat_template=template)
    ids = tokenizer.encode_chat([{"role": "user", "content": "hello"}]).ids.tolist()
    assert ids == [1, *processor().encode("hello", add_bos=False), 2]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ (messages | map(attribute='__class__') | first).mro() }}",
        "{% set _ = messages[0].update({'content': 'b'}) %}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('a role that is not known') }}",
        "{{ range(10**9) | list }}",
        "{{ messages[0].content // 0 }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_reaches_nothing_outside(source: str) -> None:
    """It runs in a sandbox; whatever it raises is one error, and the messages are as they were."""
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(lz.ChatTemplateError, match="messages needs what the chat template takes"):
        lz.ChatTemplate(source).render(messages)
    assert messages == [{"role": "user", "content": "a"}]


def test_a_message_is_never_a_template() -> None:
    """Braces in a message are text, and a format reaches no attribute of the inside."""
    content = "{{ 7 * 7 }} {0.__class__}"
    assert lz.ChatTemplate("{{ messages[0].content }}").render([{"content": content}]) == content
    for source in (
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ ('{0.__class__}' | attr('format'))(messages) }}",
        "{% set form = '{0.__class__}'.format %}{{ form(messages) }}",
        "{% set form = '{a.__class__}'.format_map %}{{ form({'a': messages}) }}",
    ):
        try:
            said = lz.ChatTemplate(source).render([{"content": content}])
        except lz.ChatTemplateError:
            continue
        assert "class" not in said, source


@pytest.mark.parametrize("installed", ["3.1.5", "2.11.3"])
def test_a_sandbox_with_known_holes_is_not_used(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    """torch brings jinja2 of any release, whatever our extra asks for."""
    monkeypatch.setattr(templates, "installed_version", lambda name: installed)
    with pytest.raises(lz.ChatTemplateError, match=rf"needs jinja2>=3\.1\.6, .* got {installed}"):
        lz.ChatTemplate("{{ messages }}")


def test_the_template_of_a_folder_is_found(tmp_path: Path) -> None:
    """In its configuration, by name among several, or in a file of its own, which wins."""
    config = tmp_path / "tokenizer_config.json"
    assert load_template(tmp_path) is None
    for entry, wanted in (
        ("one {{ bos_token }}", "one <s>"),
        ([{"name": "tools", "template": "no"}, {"name": "default", "template": "two"}], "two"),
        ([{"name": "tools", "template": "no"}], None),
        (None, None),
    ):
        config.write_text(json.dumps({"chat_template": entry, "bos_token": {"content": "<s>"}}))
        found = load_template(tmp_path)
        assert (None if found is None else found.render(MESSAGES)) == wanted
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}three")
    found = load_template(tmp_path)
    assert found is not None and found.render(MESSAGES) == "three"
    trained().save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path).render(MESSAGES) == "three"
    for content in ("{", "[]", "[" * 100_000, b"\xff"):
        config.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ConfigurationError, match=r"tokenizer_config\.json"):
            Tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_each_file_of_a_folder_has_a_bound_and_is_a_plain_one(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger one is refused by name, and so is a pipe, which nobody may ever write to."""
    trained().save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(sources, "_MAX_FILE", 1 << 20)
    monkeypatch.setattr(sources, "_MAX_BESIDE", 1 << 16)
    path = tmp_path / name
    path.write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(ConfigurationError, match=rf"a readable {name}.* has more than \d+ bytes"):
        Tokenizer(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigurationError, match=rf"a readable {name}.* no plain file"):
        Tokenizer(tmp_path)


def test_what_cannot_be_a_template_is_named() -> None:
    """A template that does not parse, and a tokenizer that has none."""
    deep = "{% for each in messages %}" * 30 + "{% endfor %}" * 30
    for source in ("{% if %}", deep, "{{ " + "(" * 10_000 + ")" * 10_000 + " }}"):
        with pytest.raises(lz.ChatTemplateError, match="chat_template needs a jinja2 template"):
            lz.ChatTemplate(source)
    with pytest.raises(ValueError, match="messages needs a tokenizer with a chat template, got none"):
        Tokenizer(encoding()).encode_chat(MESSAGES)
