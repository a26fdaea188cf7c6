"""Llama, written once for one sequence; awaited per op, per layer or per step.

`Layer.forward` and `Llama.forward` are ordinary coroutines over `ops`, and `ops` says who meets whom:
awaited ops coalesce one by one across all requests; a layer or a step given to `lz.batched` coalesces as a
whole and runs the same coroutine over blocking ops inside. Keys and values are in a `PagedCache`.

Axes: T rows (tokens of one request, or of all requests that met), H query heads, Hk key heads, D head size,
C channels, F inner channels.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

import layerzero as lz
from layerzero.kvcache import AttentionMetadata, KVCacheSpec, PagedCache, PagedSequence, TokenRange
from layerzero.parallel import TensorGroup
from layerzero.parallel import WeightSource as WeightSource
from models.llama_config import LlamaConfig as LlamaConfig
from models.sampling import SampleArgs as SampleArgs
from models.sampling import adjusted_rows, note_logprobs
from models.sampling import sample_tokens as sample_tokens
from models.weights import Weight, feed_forward, joined, project, quantized_weights_of, random_weights
from models.weights import weights_of as weights_of

FOLDER = Path(__file__).resolve().parents[1] / "data" / "generate"
# Rows that a step is captured for: from some hundred rows on, rows of padding take the time of real ones.
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
# The same for steps with prompts; larger ones take so long that launching op by op keeps up.
PREFILL_BUCKETS = (*range(64, 513, 64), *range(640, 1025, 128), 1280, 1536)
T = TypeVar("T")
Per = Literal["op", "layer", "step"]


# -- who meets whom -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ops:
    """The ops that the model is written over, all awaitable."""

    embedding: Callable[..., Awaitable[Any]]
    rms_norm: Callable[..., Awaitable[Any]]
    add_rms_norm: Callable[..., Awaitable[Any]]
    linear: Callable[..., Awaitable[Any]]
    rope: Callable[..., Awaitable[Any]]
    paged_attention: Callable[..., Awaitable[Any]]
    mlp: Callable[..., Awaitable[Any]]
    append_kv: Callable[..., Awaitable[Any]]
    rope_append_kv: Callable[..., Awaitable[Any]]
    quantized_linear: Callable[..., Awaitable[Any]]


def _as_coroutine(op: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """A blocking op where an awaitable one is expected: it never suspends."""

    async def call(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    return call


def run_sync(coro: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never suspends."""
    try:
        coro.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    coro.close()
    raise RuntimeError("a coroutine over blocking ops suspended")


_NAMES = tuple(field.name for field in fields(Ops))
AWAITED = Ops(**{name: getattr(lz, name) for name in _NAMES})
BLOCKING = Ops(**{name: _as_coroutine(getattr(lz.sync, name)) for name in _NAMES})


# -- the model ------------------------------------------------------------------------------------------


class Layer:
    """One decoder layer: its weights, and its pages of keys and values.

    `shares` makes the sums of a layer whose heads and columns are spread over several ranks.
    """

    shares = TensorGroup()

    def __init__(
        self,
        index: int,
        config: LlamaConfig,
        get: WeightSource,
        norm: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: PagedCache,
    ) -> None:
        """`norm` (C,) is the weight of the norm that the layer's input comes through."""
        self.input_norm = norm
        self.split = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        self.cos, self.sin = rotary
        self.cache = cache
        self.k_cache, self.v_cache = cache.pools[index]
        self.k_scale: Tensor | None
        self.v_scale: Tensor | None
        self.k_scale, self.v_scale = cache.scales[index]
        name, wide = f"model.layers.{index}", config.hidden_size

        def stacked(of: str, parts: Mapping[str, int], biased: bool) -> tuple[Weight, Tensor | None]:
            rows = [get(f"{name}.{of}.{part}.weight", (size, wide)) for part, size in parts.items()]
            bias = (
                [get(f"{name}.{of}.{part}.bias", (size,)) for part, size in parts.items()] if biased else None
            )
            return joined(rows), None if bias is None else torch.cat(bias)

        heads = {
            "q_proj": config.num_attention_heads,
            "k_proj": config.num_key_value_heads,
            "v_proj": config.num_key_value_heads,
        }
        sizes = {part: count * config.head_dim for part, count in heads.items()}
        self.w_qkv, self.b_qkv = stacked("self_attn", sizes, config.attention_bias)
        self.w_o = get(f"{name}.self_attn.o_proj.weight", (wide, sizes["q_proj"]))
        self.b_o = get(f"{name}.self_attn.o_proj.bias", (wide,)) if config.attention_bias else None
        self.post_attention_norm = get(f"{name}.post_attention_layernorm.weight", (wide,))
        # What the MLP expects: the gate's rows above the others'.
        self.w_up, self.b_up = stacked(
            "mlp",
            {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size},
            config.mlp_bias,
        )
        self.w_down = get(f"{name}.mlp.down_proj.weight", (wide, config.intermediate_size))
        self.b_down = get(f"{name}.mlp.down_proj.bias", (wide,)) if config.mlp_bias else None
        # A layer ends with the norm that the next one begins with: both fit one kernel.
        last = index == config.num_hidden_layers - 1
        following = "model.norm" if last else f"model.layers.{index + 1}.input_layernorm"
        self.next_norm = get(f"{following}.weight", (wide,))

    async def forward(
        self, ops: Ops, normed: Tensor, x: Tensor, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """(normed, x), each (T, C) or a rank's rows: the residual stream `x`, and it normed for the next."""
        shares, rows = self.shares, len(metadata.positions)
        normed = shares.gather_rows(normed, rows)
        qkv = await project(ops, normed, self.w_qkv, self.b_qkv)
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).split(self.split, dim=1)
        turn = metadata.positions, self.cos, self.sin
        place = self.k_cache, self.v_cache, metadata.slot_mapping
        scales = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        if self.k_scale is None:
            q = await ops.rope_append_kv(q, k, v, *turn, *place)
        else:
            q, k = await ops.rope(q, k, *turn)
            await ops.append_kv(k, v, *place, **scales)
        mixed = await ops.paged_attention(
            q,
            self.k_cache,
            self.v_cache,
            metadata.block_tables,
            metadata.seq_lens,
            cu_seqlens_q=metadata.cu_seqlens_q,
            **scales,
        )
        out = shares.reduce(await project(ops, mixed.flatten(1), self.w_o, self.b_o))
        normed, x = await ops.add_rms_norm(out, x, self.post_attention_norm, eps=self.eps)
        normed = shares.gather_rows(normed, rows)
        out = shares.reduce(await feed_forward(ops, normed, self.w_up, self.w_down, self.b_up, self.b_down))
        normed, x = await ops.add_rms_norm(out, x, self.next_norm, eps=self.eps)
        return normed, x

    def forward_batch(self, x: Tensor, spans: list[TokenRange]) -> Tensor:
        """The residual stream `x` (T, C) of all callers behind this layer."""
        return self.forward_batch_normed(x, spans)[1]

    def forward_batch_normed(self, x: Tensor, spans: list[TokenRange]) -> tuple[Tensor, Tensor]:
        """`forward` for the rows of all callers at once; they are normed here, so that one tensor goes from
        layer to layer and not two."""
        normed = lz.sync.rms_norm(x, self.input_norm, eps=self.eps)
        return run_sync(self.forward(BLOCKING, normed, x, self.cache.attention_metadata(spans)))


class Llama:
    """A Llama over one paged cache; `per` is what one await covers: an op, a layer or a whole step."""

    shares = vocabulary = TensorGroup()  # of the ranks that share its layers; its table and its head

    def __init__(self, config: LlamaConfig, get: WeightSource, cache: PagedCache, per: Per = "step") -> None:
        """`get(name, shape)` gives the weight that Hugging Face's Llama has under `name`."""
        self.config, self.cache, self.per = config, cache, per
        tables = lz.rope_tables(
            config.head_dim,
            config.max_position_embeddings,
            base=config.rope_theta,
            scaling=config.rope_scaling,
            device=cache.device,
        )
        self.embed_tokens = get("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self.lm_head = (
            self.embed_tokens
            if config.tie_word_embeddings
            else get("lm_head.weight", (config.vocab_size, config.hidden_size))
        )
        self.input_norm = get("model.layers.0.input_layernorm.weight", (config.hidden_size,))
        self.layers: list[Layer] = []
        for index in range(config.num_hidden_layers):
            norm = self.layers[-1].next_norm if self.layers else self.input_norm
            self.layers.append(Layer(index, config, get, norm, tables, cache))
        self._batched_layers = [lz.batched(layer.forward_batch) for layer in self.layers]
        self._batched_first_layer = lz.batched(self.first_layer_batch)
        self._batched_last_layer = lz.batched(self.last_layer_batch)
        self._batched_step = lz.batched(self.step_batch)
        self._batched_sample = lz.batched(self.sample_next_batch)
        self._batched_all_positions = lz.batched(self.forward_all_positions_batch)
        self._awaited = [partial(layer.forward, AWAITED) for layer in self.layers]
        self._blocking = [partial(layer.forward, BLOCKING) for layer in self.layers]

    def sequence(self, tokens: int) -> PagedSequence:
        """Open a sequence with pages for so many tokens; a context manager that gives them back.

        Raises: ValueError: the model, or the pool, could never hold it. PagesExhaustedError: it cannot now.
        """
        max_tokens = self.config.max_position_embeddings
        if tokens > max_tokens:
            raise ValueError(f"tokens needs at most {max_tokens}, the model's positions, got {tokens}")
        return self.cache.sequence(tokens)

    async def step(self, ids: Tensor, span: TokenRange) -> Tensor:
        """The logits (1, V) after the tokens `ids` (n,) of one sequence, which `span` gives places to."""
        if self.per == "step":
            logits: Tensor = await self._batched_step(ids, span)
            return logits
        if self.per == "layer":
            x = await lz.embedding(ids, self.embed_tokens)
            for layer in self._batched_layers:
                x = await layer(x, span)
            normed = await lz.rms_norm(x[-1:], self.layers[-1].next_norm, eps=self.config.rms_norm_eps)
            return await project(AWAITED, normed, self.lm_head)
        return await self.forward(AWAITED, self._awaited, ids, self.cache.attention_metadata([span]))

    async def sample_next(self, ids: Tensor, span: TokenRange, draw: SampleArgs) -> Tensor:
        """The token (1,) that follows `ids` (n,) of one sequence; layer by layer the last one draws it."""
        if self.per == "step" or (self.per == "layer" and len(self.layers) == 1):
            # Prompts go behind those that draw their next token, where one step can't take all.
            token: Tensor = await self._batched_sample(ids, span, draw, priority=1 + (span.count > 1))
            return token
        if self.per == "layer":
            x = await self._batched_first_layer(ids, span)
            for layer in self._batched_layers[1:-1]:
                x = await layer(x, span)
            last: Tensor = await self._batched_last_layer(x, span, draw)
            return last
        logits = await self.step(ids, span)
        sampled: Tensor = await lz.sample(
            adjusted_rows(logits, [draw]),
            temperature=draw.temperature,
            top_k=draw.top_k,
            top_p=draw.top_p,
            seed=draw.seed,
            offset=draw.offset,
        )
        note_logprobs(logits, sampled, [draw])
        return sampled

    async def forward(
        self,
        ops: Ops,
        layers: Sequence[Callable[..., Awaitable[Any]]],
        ids: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """The logits (B, V) of each sequence's last row among `ids` (T,)."""
        x = await self.embed(ops, ids)
        normed = await ops.rms_norm(x, self.input_norm, eps=self.config.rms_norm_eps)
        for layer in layers:
            normed, x = await layer(normed, x, metadata)
        return await self.head(ops, normed, metadata)

    async def embed(self, ops: Ops, ids: Tensor) -> Tensor:
        """The residual stream (T, C) that the tokens `ids` (T,) begin with."""
        if self.vocabulary.ranks > 1:
            return self.vocabulary.embedding(ids, self.embed_tokens)
        return self.shares.keep_rows(await ops.embedding(ids, self.embed_tokens))

    async def head(self, ops: Ops, normed: Tensor, metadata: AttentionMetadata) -> Tensor:
        """The logits (B, V) of each sequence's last row among `normed` (T, C)."""
        rows = self.shares.gather_rows(normed, len(metadata.positions))[metadata.logits_indices]
        return self.vocabulary.gather_columns(await project(ops, rows, self.lm_head))

    async def forward_all_positions(self, ids: Tensor, span: TokenRange) -> Tensor:
        """The logits (n, V) after each of the tokens `ids` (n,), as a verified draft needs them."""
        logits: Tensor = await self._batched_all_positions(ids, span)
        return logits

    def forward_all_positions_batch(self, ids: Tensor, spans: list[TokenRange]) -> Tensor:
        """`forward_all_positions` for all callers at once: (T, V), by graphs on CUDA."""
        return self.runners[1].all_positions(spans, ids)

    def step_batch(self, ids: Tensor, spans: list[TokenRange]) -> Tensor:
        """`step` for all callers at once: (B, V)."""
        return run_sync(self.forward(BLOCKING, self._blocking, ids, self.cache.attention_metadata(spans)))

    def sample_next_batch(self, ids: Tensor, spans: list[TokenRange], draws: list[SampleArgs]) -> Tensor:
        """`next` for all callers at once: (B,), by graphs on CUDA."""
        greedy, logits = self.runners
        if all(draw.is_greedy for draw in draws):
            return greedy(spans, ids)
        return sample_tokens(logits(spans, ids), draws)

    def greedy_step(self, metadata: AttentionMetadata, ids: Tensor) -> Tensor:
        """The likeliest token (B,) of each sequence after the rows `ids` (T,), for `lz.StepRunner`."""
        greedy: Tensor = lz.sync.sample(
            run_sync(self.forward(BLOCKING, self._blocking, ids, metadata)), temperature=0.0, seed=0
        )
        return greedy

    def logits_step(self, metadata: AttentionMetadata, ids: Tensor) -> Tensor:
        """The logits (B, V) of each sequence after the rows `ids` (T,), for `lz.StepRunner`."""
        return run_sync(self.forward(BLOCKING, self._blocking, ids, metadata))

    @cached_property
    def runners(self) -> tuple[lz.StepRunner, lz.StepRunner]:
        """What runs `greedy_step` and `logits_step`, on CUDA by graphs."""
        longest = min(self.config.max_position_embeddings, self.cache.allocator.total * self.cache.page_size)
        sizes: dict[str, Any] = {"buckets": BUCKETS, "prefill_buckets": PREFILL_BUCKETS}
        greedy, logits = (
            lz.StepRunner(step, self.cache, max_model_len=longest, max_num_seqs=BUCKETS[-1], **sizes)
            for step in (self.greedy_step, self.logits_step)
        )
        return greedy, logits

    def first_layer_batch(self, ids: Tensor, spans: list[TokenRange]) -> Tensor:
        """The first layer of the tokens `ids` (T,) of all callers: (T, C)."""
        return self.layers[0].forward_batch(lz.sync.embedding(ids, self.embed_tokens), spans)

    def last_layer_batch(self, x: Tensor, spans: list[TokenRange], draws: list[SampleArgs]) -> Tensor:
        """The last layer, and the token that follows each caller's last row: (B,)."""
        normed, _ = self.layers[-1].forward_batch_normed(x, spans)
        rows = normed[self.cache.attention_metadata(spans).logits_indices]
        return sample_tokens(run_sync(project(BLOCKING, rows, self.lm_head)), draws)


def load(
    folder: Path = FOLDER,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    pages: int = 512,
    page_size: int = 16,
    per: Per = "step",
    kv_dtype: torch.dtype | None = None,
    dummy: bool = False,
) -> Llama:
    """Load a Hugging Face Llama folder onto `device` with a pool of `pages` pages.

    Weights stay quantized where the folder's are; `kv_dtype` keeps keys and values in eight bits. `dummy`
    reads only the folder's config, and draws random weights.
    Raises: ValueError: the folder's model is no Llama, or not quantized as it says. FileNotFoundError: a file
        is missing.
    """
    config = LlamaConfig.read(folder)
    if dummy:
        get = random_weights(device, dtype)
    else:
        get = quantized_weights_of(folder, device, dtype) or weights_of(folder, device, dtype)
    return Llama(config, get, kv_pool(config, device, dtype, pages, page_size, kv_dtype), per)


def random(
    config: LlamaConfig, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32,
    pages: int = 512, page_size: int = 16, per: Per = "step", seed: int = 0,
) -> Llama:  # fmt: skip
    """A Llama of `config`'s shape with random weights, for measurements."""
    get = random_weights(device, dtype, seed)
    return Llama(config, get, kv_pool(config, device, dtype, pages, page_size), per)


def kv_pool(
    config: LlamaConfig, device: torch.device | str, dtype: torch.dtype, pages: int, page_size: int,
    kv_dtype: torch.dtype | None = None,
) -> PagedCache:  # fmt: skip
    """The pages that a model of `config` keeps its keys and values in, in `kv_dtype` where one is given."""
    spec = KVCacheSpec(
        config.num_key_value_heads, config.head_dim, dtype=dtype, device=device, pool_dtype=kv_dtype
    )
    return PagedCache(spec, pages=pages, page_size=page_size, layers=config.num_hidden_layers)
