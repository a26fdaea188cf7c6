"""One model in this process: its pages, its captured steps, and what is counted about them."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any

import torch
from models.llama import Llama, load

import layerzero as lz
from server.engine import PREFILL_CHUNK, Drawn, Engine
from server.front import KV_FORMATS as KV_FORMATS
from server.front import Choice, Front
from server.front import Full as Full
from server.front import Options as Options

# How long prompts may wait behind next tokens before they are level with them.
PROMPTS_WAIT_MS = 2000.0
LOG = logging.getLogger("layerzero.server")


def settings_of(options: Options) -> lz.Settings:
    """The settings of the runtime that draws tokens."""
    fleet: dict[str, Any] = {} if options.cluster is None else {"cluster": options.cluster}
    if options.replicas is not None:
        fleet |= {"cluster_devices": options.replicas}
    # One step takes so many rows that next tokens never wait long for the prompts of others.
    return lz.Settings.load(
        device=options.device, inference=True, freeze_gc=True,
        determinism="strict" if options.strict else "default",
        max_num_batched_tokens=options.max_num_batched_tokens, priority_aging_ms=PROMPTS_WAIT_MS, **fleet,
    )  # fmt: skip


class Service(Front):
    """A front whose tokens are drawn in this process."""

    def __init__(self, options: Options, runtime: lz.Runtime) -> None:
        self._bundle = ""
        self._device = runtime.device(options.device)
        if options.bundle is not None:  # before anything is chosen: what it brings need not be compiled
            loaded = lz.load_bundle(options.bundle, sha256=options.bundle_sha256, device=options.device)
            self._bundle = loaded.sha256
            if loaded.manifest is not None:
                lz.warmup_blocking(loaded.manifest, device=options.device)
        self.model: Llama = load(
            options.model,
            device=options.device,
            dtype=torch.float32 if options.device == "cpu" else torch.bfloat16,
            pages=options.pages,
            page_size=options.page_size,
            per=options.per,
            kv_dtype=KV_FORMATS[options.kv_format],
            dummy=options.load_format == "dummy",
        )
        self.engine = Engine(
            self.model,
            self.model.config.eos_token_ids,
            max_waiting_tokens=options.max_waiting_tokens,
            prefill_chunk=min(PREFILL_CHUNK, options.max_num_batched_tokens),
        )
        super().__init__(options, runtime, self.model.config, self.engine.requests.capacity)
        if options.device == "cuda":
            self._capture(runtime)

    def _capture(self, runtime: lz.Runtime) -> None:
        """Capture the steps ahead, unless a compiler is at work: they would be captured again behind it.

        Requests are served by what is ready meanwhile, and each step is captured when it is first wanted.
        """
        runners = self.model.runners  # they take pages, which no request can have
        loader = runtime.device(self.options.device).loader
        for runner in runners:
            ahead: list[tuple[list[int], list[int]]] = [([rows], []) for rows in reversed(runner.buckets)]
            ahead += [([], [rows]) for rows in reversed(runner.prefill_buckets)]
            for buckets, prefill_buckets in ahead:
                if loader.compiling:
                    return
                runner.capture(buckets=buckets, prefill_buckets=prefill_buckets)

    def gauges(self) -> dict[str, tuple[str, Callable[[], float]]]:
        return {
            **super().gauges(),
            "kernels_loading": ("1 while kernels are compiled or loaded", self._loading),
            "requests_waiting": ("choices that wait for pages", lambda: self.engine.requests.waiting),
            "kv_pages_free": ("pages that no request holds", lambda: self.model.cache.allocator.free_pages),
        }

    def _loading(self) -> bool:
        return self._device.loader.loading

    def counted(self) -> Iterable[tuple[str, str, float]]:
        requests = self.engine.requests
        yield "preemptions", "choices that gave their pages back", requests.preemptions
        yield "prompt_tokens", "tokens of prompts", requests.prompt_tokens
        yield "reused_tokens", "tokens of prompts found computed", requests.reused_tokens

    @property
    def captures(self) -> int:
        """How many steps have been captured."""
        return sum(runner.captures for runner in self.model.runners) if self.options.device == "cuda" else 0

    async def state(self) -> dict[str, Any]:
        """What is going on, for /health."""
        pages = self.model.cache.allocator
        brought = {"bundle": self._bundle} if self._bundle else {}
        return {
            "requests": self.active,
            "pages": pages.total,
            "pages_free": pages.free_pages,
            "tokenizer": self.tokenizer.identity.digest,
            "captures": self.captures,
            **brought,
        }

    def generate(self, choice: Choice, so_far: Sequence[int] = ()) -> AsyncGenerator[Drawn, None]:
        return self.engine.generate(
            choice.prompt, choice.sampling, choice.max_tokens, user=choice.user, grammar=choice.grammar,
            ignore_eos=choice.ignore_eos, patient=choice.patient, so_far=so_far,
        )  # fmt: skip


async def open_service(options: Options, runtime: lz.Runtime) -> Front:
    """What draws tokens from this process: its own model, or replicas on the devices of a cluster."""
    if options.cluster is None:
        return Service(options, runtime)
    from server.fleet import FleetService

    return await FleetService.open(options, runtime)
