"""Messages into a prompt: chat templates of model folders, run where they can reach nothing else."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from layerzero._util.version import installed_version
from layerzero.spec.errors import ChatTemplateError
from layerzero.spec.kernel import version

Message = Mapping[str, Any]
# CVE-2024-56326 and CVE-2025-27516: before, a template could reach `str.format` and run code.
_SAFE = (3, 1, 6)


class ChatTemplate:
    """A jinja2 template from messages to a prompt; `special_tokens` are values it knows, as `bos_token`.

    It runs in jinja2's sandbox: it changes none of its arguments and reaches no attribute that begins with an
    underscore. What a message holds is a value, never a template.
    Raises: ChatTemplateError: the source is no template, or the installed jinja2 has a sandbox with holes.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        installed = installed_version("jinja2") or ""
        if version(installed) < _SAFE:  # torch brings jinja2 of any release
            raise ChatTemplateError(
                f"chat_template needs jinja2>=3.1.6, whose sandbox holds, got {installed}"
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        if special_tokens is not None and not isinstance(special_tokens, Mapping):
            raise TypeError(f"special_tokens needs texts by name, got {type(special_tokens).__name__}")
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # jinja2's, and Python's of what jinja2 makes of it
            raise ChatTemplateError(f"chat_template needs a jinja2 template: {error}") from error
        self._source, self._special = source, dict(special_tokens or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, (self._source, self._special)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        **values: Any,
    ) -> str:
        """The prompt, up to where the answer begins; `values` are further ones that the template knows.

        Raises: ChatTemplateError: the messages do not fit the template.
        """
        context = {
            **self._special, **values, "messages": messages, "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }  # fmt: skip
        try:
            return self._template.render(context)
        except Exception as error:  # of the template's own code
            raise ChatTemplateError(f"messages needs what the chat template takes: {error}") from error


class MistralTemplate:
    """What mistral-common makes of messages: ids, in which no text of a message is a special token."""

    def __init__(self, source: Any, request: Any) -> None:
        self._source, self._request = source, request

    def ids(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> list[int]:
        """The prompt's ids.

        Raises: ChatTemplateError: the messages are none that the tokenizer's version takes.
        """
        plain = [dict(message) for message in messages]
        try:
            request = self._request.from_openai(plain, None if tools is None else [dict(t) for t in tools])
            ids: list[int] = self._source.encode_chat_completion(request).tokens
        except Exception as error:  # pydantic's, and a family of the library's own
            raise ChatTemplateError(f"messages needs what mistral-common takes: {error}") from error
        return ids


Template = ChatTemplate | MistralTemplate


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """JSON as transformers' templates expect it: without HTML's escapes."""
    return json.dumps(value, **{"ensure_ascii": False, "indent": indent, **options})


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
