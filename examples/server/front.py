"""What one process does for every request, wherever its tokens are drawn: limits, tokens, texts, counts."""

from __future__ import annotations

import json
import math
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import torch
from models.llama import FOLDER, LlamaConfig, Per
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily

import layerzero as lz
from layerzero.api import metrics
from server.answers import ChoiceText, Piece, Usage
from server.counts import OUTCOMES, Counts
from server.engine import Drawn, Grammar
from server.fields import BadRequest, OtherTokenizer
from server.protocol import Ask, Constraint, Sampling

Emit = Callable[[Piece], Awaitable[None]]
_SEEDS = 1 << 63
# So many messages and more are rendered beside the loop.
MANY_MESSAGES = 256
# Characters of a schema or regular expression: every mask of a larger one would hold up the loop.
MAX_GRAMMAR = 1 << 16


# What keys and values are kept in: as they are computed, or eight bits.
KV_FORMATS = {"": None, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}


# Fronts that a fleet on CUDA has by default, at most.
FRONTS = 4

# Where weights come from: the folder, or nowhere: random ones, for measurements.
LOAD_FORMATS = ("safetensors", "dummy")


@dataclass(frozen=True, slots=True)
class Options:
    """How the server runs; `kv_format` is one of `KV_FORMATS`, `load_format` one of `LOAD_FORMATS`.

    With `cluster` there are replicas on `replicas` devices of that Ray cluster, by default on all. With
    `engine_process` tokens are drawn in a process of their own; None: on CUDA. `fronts` is how many processes
    answer HTTP; None: one, with a cluster on CUDA as many as replicas, at most `FRONTS`.
    """

    model: Path = FOLDER
    device: str = "cpu"
    per: Per = "step"
    pages: int = 1024
    page_size: int = 16
    kv_format: str = ""
    load_format: str = "safetensors"
    max_requests: int = 256
    max_waiting_tokens: int = 1 << 17
    max_num_batched_tokens: int = 1536
    max_body: int = 4 << 20
    prompt_cache: int = 16 << 20
    strict: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    drain_s: int = 30
    bundle: Path | None = None
    bundle_sha256: str | None = None
    cluster: str | None = None
    replicas: int | None = None
    engine_process: bool | None = None
    fronts: int | None = None

    @property
    def front_count(self) -> int:
        """How many processes answer HTTP."""
        if self.fronts is not None:
            return self.fronts
        spread = self.cluster is not None and self.device == "cuda" and hasattr(socket, "SO_REUSEPORT")
        return min(self.replicas or FRONTS, FRONTS) if spread else 1

    @property
    def is_split(self) -> bool:
        """Whether tokens are drawn, or sent to replicas, in another process than one that answers HTTP."""
        wanted = self.device == "cuda" if self.engine_process is None else self.engine_process
        return self.front_count > 1 or (wanted and self.cluster is None)


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to a request, in the model's terms; for `patient` see `Engine.generate`.

    `grammar` is `constraint` compiled, where tokens are drawn in this process.
    """

    prompt: list[int]
    sampling: Sampling
    max_tokens: int
    user: str
    constraint: Constraint | None
    ignore_eos: bool
    patient: bool
    grammar: Grammar | None = None


class Full(Exception):
    """The server takes no further request now; try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = max(1, math.ceil(retry_after))


class Front(ABC):
    """The tokenizer, the limits and the counts of requests; `generate` is where their tokens come from."""

    def __init__(
        self,
        options: Options,
        runtime: lz.Runtime | None,
        config: LlamaConfig,
        capacity: int,
        counts: Counts | None = None,
    ) -> None:
        """`capacity` is how many tokens one request may have for want of pages.

        /metrics has what `runtime` counts; None where tokens are drawn by the runtime of another process.
        `counts` are those of all fronts, where there are several.
        """
        self.options, self.config = options, config
        self.counts = Counts() if counts is None else counts
        self.name = options.model.resolve().name
        self.prompts = lz.PromptCache(options.prompt_cache)
        self.tokenizer = lz.Tokenizer(options.model, cache=self.prompts)
        self.tokenizer.require(vocabulary=config.vocab_size)
        self._grammars: Any = None
        self._hits = 0  # of the prompt cache, that are counted
        # How many tokens a prompt and its answer may have together.
        self.max_model_len = min(config.max_position_embeddings, capacity)
        # No prompt of more characters can fit, so none is taken apart.
        longest = max(len(self.tokenizer.token_bytes(token)) for token in self.tokenizer.ids)
        self.max_prompt_characters = self.max_model_len * longest
        self.started = int(time.time())
        self.registry = CollectorRegistry()
        if runtime is not None:
            self.registry.register(metrics.collector(runtime))
        self.registry.register(self)
        for name, (what, value) in self.gauges().items():
            Gauge(name, what, registry=self.registry).set_function(value)

    def gauges(self) -> dict[str, tuple[str, Callable[[], float]]]:
        """What /metrics reads off, by name."""
        return {"requests_in_flight": ("requests being answered", lambda: self.active)}

    @property
    def active(self) -> int:
        """Requests being answered, by all fronts."""
        return self.counts.total("active")

    async def exposed(self) -> CollectorRegistry:
        """What /metrics shows."""
        return self.registry

    def missing(self) -> list[str]:
        """What is missing until requests can be answered: a model is loaded before anything is served."""
        return []

    @abstractmethod
    async def state(self) -> dict[str, Any]:
        """What is going on, for /health."""

    @abstractmethod
    def counted(self) -> Iterable[tuple[str, str, float]]:
        """What has been counted where tokens are drawn: a name, what it is, a number."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        """The counts for /metrics."""
        requests = CounterMetricFamily("requests", "requests by how they ended", labels=["outcome"])
        for outcome in OUTCOMES:
            requests.add_metric([outcome], self.counts.total(outcome))
        yield requests
        for family in (
            *self.counted(),
            ("generated_tokens", "tokens drawn", self.counts.total("tokens")),
            ("prompt_cache_hits", "prompts found tokenized", self.counts.total("prompt_cache_hits")),
        ):
            yield CounterMetricFamily(*family)

    @abstractmethod
    def generate(self, choice: Choice, so_far: Sequence[int] = ()) -> AsyncGenerator[Drawn, None]:
        """The tokens of one choice behind those that were drawn `so_far`; see `Engine.generate`."""

    async def forward(self, choice: Choice, so_far: Sequence[int], to: Callable[[Drawn], None]) -> None:
        """Pass the tokens that `generate` would give on to `to`."""
        tokens = self.generate(choice, so_far)
        async with aclosing(tokens):
            async for drawn in tokens:
                to(drawn)

    async def answer(self, ask: Ask, emit: Emit) -> Usage:
        """Give the answer's pieces to `emit` as they come, choices in any order; the counts at the end.

        Raises: Full: too many requests, or a full batcher or queue. BadRequest: the request does not fit.
        """
        self.counts.add("active")  # before the look: two fronts never take the last place both
        outcome = "cancelled"
        try:
            if (others := self.active - 1) >= self.options.max_requests:
                outcome = "rejected"
                raise Full(f"{others} requests are being answered, and no more at once")
            usage = await self._choices(ask, emit)
            outcome = "done"
        except lz.OverloadedError as error:
            outcome = "rejected"
            raise Full(str(error), error.retry_after) from error
        except Full:
            raise
        except Exception:
            outcome = "failed"
            raise
        finally:
            self.counts.add("active", -1)
            self.counts.add(outcome)
        return usage

    async def _choices(self, ask: Ask, emit: Emit) -> Usage:
        """All choices side by side; a prompt's others begin when its first has computed it, and share it.

        Other prompts begin when the first choice of all has been taken: until then nothing is answered.
        """
        asked: list[Any] = [ask.messages] if ask.is_chat else ask.prompts
        prompts = [await self._prompt(ask, given) for given in asked]
        limits = [self._max_tokens(prompt, ask) for prompt in prompts]
        grammar = await self.grammar(ask.constraint)
        copies = [grammar and grammar.copy() for _ in range(ask.answers)]
        usage = Usage(prompt=sum(map(len, prompts)))
        begun = [anyio.Event() for _ in prompts]

        async def choice(index: int) -> None:
            number, later = divmod(index, ask.choices)

            async def begin(piece: Piece) -> None:
                await emit(piece)
                begun[number].set()

            if index:
                await begun[number if later else 0].wait()
            given = prompts[number], limits[number], copies[index]
            await self._choice(index, ask, *given, usage, emit if later else begin)

        try:
            async with anyio.create_task_group() as tasks:
                for index in range(ask.answers):
                    tasks.start_soon(choice, index)
        except BaseExceptionGroup as group:
            raise _only(group) from None
        return usage

    async def _choice(
        self,
        index: int,
        ask: Ask,
        prompt: list[int],
        max_tokens: int,
        grammar: Grammar | None,
        usage: Usage,
        emit: Emit,
    ) -> None:
        # A prompt among others draws what it draws alone.
        seed = ask.sampling.seed + index % ask.choices
        sampling = replace(ask.sampling, seed=(seed + _SEEDS) % (2 * _SEEDS) - _SEEDS)
        text = ChoiceText(index, lz.IncrementalDetokenizer(self.tokenizer, ask.stop))
        choice = Choice(
            prompt, sampling, max_tokens, ask.user, ask.constraint, ask.ignore_eos, index > 0, grammar
        )  # fmt: skip
        tokens = self.generate(choice)
        reason = "length"
        async with aclosing(tokens):
            async for drawn in tokens:
                usage.drawn += 1
                self.counts.add("tokens")
                piece = text.feed(drawn)
                if piece is not None:
                    await emit(piece)
                    if piece.reason:
                        return
                if drawn.ends:
                    reason = "stop"
        await emit(text.end(reason))

    # -- what a request asks, in the model's terms ------------------------------------------------------

    async def _prompt(self, ask: Ask, given: str | list[Any]) -> list[int]:
        """The tokens of a text, of ids or of messages; a long one is encoded beside the loop."""
        param = "messages" if ask.is_chat else "prompt"
        try:
            self.tokenizer.require(digest=ask.tokenizer)
        except lz.TokenizerMismatchError as mismatch:
            raise OtherTokenizer(str(mismatch), mismatch.problem.reason.value) from mismatch
        if isinstance(given, str):
            text = given
        elif not ask.is_chat:
            if not all(0 <= token < self.config.vocab_size for token in given):
                raise BadRequest(f"prompt needs token ids in [0, {self.config.vocab_size})", param)
            return given
        elif len(given) > MANY_MESSAGES:
            text = await anyio.to_thread.run_sync(self._rendered, given)
        else:
            text = self._rendered(given)
        if len(text) > self.max_prompt_characters:
            raise BadRequest(
                f"{param} needs at most {self.max_prompt_characters} characters, got {len(text)}", param
            )
        # A template has written the special tokens itself.
        tokens = await lz.tokenize(
            text, self.tokenizer, special_tokens=not ask.is_chat, parse_special=ask.is_chat
        )
        hits, self._hits = self.prompts.stats().hits - self._hits, self.prompts.stats().hits
        self.counts.add("prompt_cache_hits", hits)
        ids = tokens.as_list()
        if not ids:
            raise BadRequest(f"{param} needs at least one token", param)
        return ids

    def _rendered(self, messages: list[dict[str, Any]]) -> str:
        try:
            return self.tokenizer.render(messages)
        except lz.ChatTemplateError as refused:
            raise BadRequest(str(refused), "messages") from refused

    def _max_tokens(self, prompt: list[int], ask: Ask) -> int:
        """How many tokens may be drawn, by the request and by the model."""
        param = "messages" if ask.is_chat else "prompt"
        vocab = self.config.vocab_size
        if any(token >= vocab for token, _ in ask.sampling.logit_bias):
            raise BadRequest(f"logit_bias needs token ids in [0, {vocab})", "logit_bias")
        limit = self.max_model_len
        if ask.max_tokens is None and len(prompt) < limit:
            return limit - len(prompt)
        asked = ask.max_tokens or 1
        if len(prompt) + asked > limit:
            raise BadRequest(
                f"{param} and max_tokens need at most {limit} tokens together, got {len(prompt)} and {asked}",
                "max_tokens" if ask.max_tokens is not None else param,
            )
        return asked

    async def grammar(self, constraint: Constraint | None) -> Grammar | None:
        """The grammar of a request, compiled beside the loop."""
        if constraint is None:
            return None
        try:
            grammar: Grammar = await anyio.to_thread.run_sync(self._compile, constraint)
        except ModuleNotFoundError as missing:
            raise BadRequest(
                f"{constraint.param} needs llguidance: pip install 'layerzero-runtime[grammar]'",
                constraint.param,
            ) from missing
        except ValueError as error:
            raise BadRequest(f"{constraint.param}: {error}", constraint.param) from error
        return grammar

    def _compile(self, constraint: Constraint) -> Grammar:
        from layerzero.integrations.llguidance import Grammars

        if self._grammars is None:
            config = self.config
            text = (self.options.model / "tokenizer.json").read_text(encoding="utf-8")
            self._grammars = Grammars(text, config.vocab_size, config.eos_token_ids)
        asked = constraint.schema if constraint.regex is None else constraint.regex
        if (length := len(json.dumps(asked))) > MAX_GRAMMAR:
            raise ValueError(f"a grammar needs at most {MAX_GRAMMAR} characters, got {length}")
        compile_one = self._grammars.json_schema if constraint.regex is None else self._grammars.regex
        grammar: Grammar = compile_one(asked)
        return grammar


def _only(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended a group of choices; the others were cancelled for it."""
    first = group.exceptions[0]
    return _only(first) if isinstance(first, BaseExceptionGroup) else first
