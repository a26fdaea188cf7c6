"""Llama, written once for one sequence; awaited per op, per layer or per step.

`Layer.forward` and `Llama.forward` are ordinary coroutines over `ops`, and `ops` says who meets whom:
awaited ops coalesce one by one across all requests; a layer or a step given to `lz.batched` coalesces as a
whole and runs the same coroutine over blocking ops inside. Keys and values lie in a `PagedCache`.

Axes: T rows (tokens of one request, or of all requests that met), H query heads, Hk key heads, D head size,
C channels, F inner channels.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

import layerzero as lz
from layerzero.kvcache import PagedCache, PagedSequence, Rows, Span, Spec
from layerzero.ops.host_copies import on_device

FOLDER = Path(__file__).parent / "data" / "generate"
T = TypeVar("T")
N = TypeVar("N", int, float)
Per = Literal["op", "layer", "step"]
Get = Callable[[str, tuple[int, ...]], Tensor]


@dataclass(frozen=True)
class Config:
    """The shape of a Llama, as `config.json` of its folder gives it."""

    vocab: int
    channels: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_base: float
    positions: int
    scaling: lz.LinearScaling | lz.Llama3Scaling | lz.YarnScaling | None = None
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    end: frozenset[int] = frozenset()

    @classmethod
    def read(cls, folder: Path) -> Config:
        """Read `folder / "config.json"`.

        Raises: ValueError: the model is no Llama, or scales its rotary angles in a way unknown here.
        """
        given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if given.get("model_type") != "llama" or given.get("hidden_act", "silu") != "silu":
            raise ValueError(
                f"folder needs a Llama with silu, got {given.get('model_type')!r} with "
                f"{given.get('hidden_act')!r} in {folder}"
            )
        rotary = given.get("rope_parameters") or {}
        end = given.get("eos_token_id")
        return cls(
            vocab=given["vocab_size"],
            channels=given["hidden_size"],
            inner=given["intermediate_size"],
            layers=given["num_hidden_layers"],
            heads=given["num_attention_heads"],
            kv_heads=given.get("num_key_value_heads") or given["num_attention_heads"],
            head_dim=given.get("head_dim") or given["hidden_size"] // given["num_attention_heads"],
            eps=given["rms_norm_eps"],
            rope_base=float(rotary.get("rope_theta", given.get("rope_theta", 10000.0))),
            positions=given["max_position_embeddings"],
            scaling=_scaling(given.get("rope_scaling") or rotary, given["max_position_embeddings"]),
            tied=given.get("tie_word_embeddings", False),
            attention_bias=given.get("attention_bias", False),
            mlp_bias=given.get("mlp_bias", False),
            end=frozenset(() if end is None else [end] if isinstance(end, int) else end),
        )


def _scaling(
    given: Mapping[str, Any], positions: int
) -> lz.LinearScaling | lz.Llama3Scaling | lz.YarnScaling | None:
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return None
    factor, trained = given["factor"], given.get("original_max_position_embeddings", positions)
    if kind == "linear":
        return lz.LinearScaling(factor)
    if kind == "llama3":
        return lz.Llama3Scaling(factor, given["low_freq_factor"], given["high_freq_factor"], trained)
    if kind == "yarn":
        return lz.YarnScaling(factor, trained, given.get("beta_fast", 32.0), given.get("beta_slow", 1.0))
    raise ValueError(f"rope_scaling needs default, linear, llama3 or yarn, got {kind!r}")


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


def _at_once(op: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """A blocking op where an awaitable one is expected: it never suspends."""

    async def call(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    return call


def finished(coro: Coroutine[Any, Any, T]) -> T:
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
BLOCKING = Ops(**{name: _at_once(getattr(lz.sync, name)) for name in _NAMES})


@dataclass(slots=True)
class Draw:
    """How one sequence's next token is drawn; `offset` counts its draws, so that each has its own."""

    temperature: float
    top_p: float
    seed: int
    offset: int


def _alike(values: list[N], device: torch.device) -> N | Tensor:
    """The number that all callers give, or one a row."""
    if values.count(values[0]) == len(values):
        return values[0]
    return on_device(torch.tensor(values, dtype=torch.float64), device)


def tokens(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The tokens (B,) for the rows of `logits`, each drawn as its caller wants it."""
    temperature = _alike([draw.temperature for draw in draws], logits.device)
    if not isinstance(temperature, Tensor) and temperature == 0:  # the likeliest: nothing is drawn
        likeliest: Tensor = lz.sync.sample(logits, temperature=0.0, seed=0)
        return likeliest
    seeds = on_device(torch.tensor([(draw.seed, draw.offset) for draw in draws]), logits.device)
    sampled: Tensor = lz.sync.sample(
        logits,
        temperature=temperature,
        top_p=_alike([draw.top_p for draw in draws], logits.device),
        seed=seeds[:, 0],
        offset=seeds[:, 1],
    )
    return sampled


# -- the model ------------------------------------------------------------------------------------------


def _whole(rows: Tensor) -> Tensor:
    return rows


class Layer:
    """One decoder layer: its weights, and its pages of keys and values.

    `reduce` makes the sums of a layer whose heads and columns are spread over several ranks.
    """

    reduce: Callable[[Tensor], Tensor] = staticmethod(_whole)

    def __init__(
        self,
        index: int,
        config: Config,
        get: Get,
        norm: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: PagedCache,
    ) -> None:
        """`norm` (C,) is the weight of the norm that the layer's input comes through."""
        self.norm = norm
        self.split = (config.heads, config.kv_heads, config.kv_heads)
        self.head_dim, self.eps = config.head_dim, config.eps
        self.cos, self.sin = rotary
        self.cache = cache
        self.k_pages, self.v_pages = cache.pools[index]
        name, wide = f"model.layers.{index}", config.channels

        def stacked(of: str, parts: Mapping[str, int], biased: bool) -> tuple[Tensor, Tensor | None]:
            rows = [get(f"{name}.{of}.{part}.weight", (size, wide)) for part, size in parts.items()]
            bias = (
                [get(f"{name}.{of}.{part}.bias", (size,)) for part, size in parts.items()] if biased else None
            )
            return torch.cat(rows), None if bias is None else torch.cat(bias)

        heads = {"q_proj": config.heads, "k_proj": config.kv_heads, "v_proj": config.kv_heads}
        sizes = {part: count * config.head_dim for part, count in heads.items()}
        self.w_qkv, self.b_qkv = stacked("self_attn", sizes, config.attention_bias)
        self.w_out = get(f"{name}.self_attn.o_proj.weight", (wide, sizes["q_proj"]))
        self.b_out = get(f"{name}.self_attn.o_proj.bias", (wide,)) if config.attention_bias else None
        self.norm_mlp = get(f"{name}.post_attention_layernorm.weight", (wide,))
        # What the MLP expects: the gate's rows above the others'.
        self.w_up, self.b_up = stacked(
            "mlp", {"gate_proj": config.inner, "up_proj": config.inner}, config.mlp_bias
        )
        self.w_down = get(f"{name}.mlp.down_proj.weight", (wide, config.inner))
        self.b_down = get(f"{name}.mlp.down_proj.bias", (wide,)) if config.mlp_bias else None
        # A layer ends with the norm that the next one begins with: both fit one kernel.
        last = index == config.layers - 1
        following = "model.norm" if last else f"model.layers.{index + 1}.input_layernorm"
        self.norm_next = get(f"{following}.weight", (wide,))

    async def forward(self, ops: Ops, normed: Tensor, x: Tensor, at: Rows) -> tuple[Tensor, Tensor]:
        """(normed, x), each (T, C): the residual stream `x`, and it normed for whoever comes next."""
        qkv = await ops.linear(normed, self.w_qkv, self.b_qkv)
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).split(self.split, dim=1)
        q, k = await ops.rope(q, k, at.positions, self.cos, self.sin)
        await ops.append_kv(k, v, self.k_pages, self.v_pages, at.slots)
        mixed = await ops.paged_attention(
            q, self.k_pages, self.v_pages, at.tables, at.lengths, cu_seqlens=at.offsets
        )
        out = self.reduce(await ops.linear(mixed.flatten(1), self.w_out, self.b_out))
        normed, x = await ops.add_rms_norm(out, x, self.norm_mlp, eps=self.eps)
        out = await ops.mlp(normed, self.w_up, self.w_down, self.b_up, self.b_down, activation="swiglu")
        out = self.reduce(out)
        normed, x = await ops.add_rms_norm(out, x, self.norm_next, eps=self.eps)
        return normed, x

    def rows(self, x: Tensor, spans: list[Span]) -> Tensor:
        """The residual stream `x` (T, C) of all callers behind this layer."""
        return self.both(x, spans)[1]

    def both(self, x: Tensor, spans: list[Span]) -> tuple[Tensor, Tensor]:
        """`forward` for the rows of all callers at once; they are normed here, so that one tensor goes from
        layer to layer and not two."""
        normed = lz.sync.rms_norm(x, self.norm, eps=self.eps)
        return finished(self.forward(BLOCKING, normed, x, self.cache.rows(spans)))


class Llama:
    """A Llama over one paged cache; `per` is what one await covers: an op, a layer or a whole step."""

    def __init__(self, config: Config, get: Get, cache: PagedCache, per: Per = "step") -> None:
        """`get(name, shape)` gives the weight that Hugging Face's Llama has under `name`."""
        self.config, self.cache, self.per = config, cache, per
        tables = lz.rope_tables(
            config.head_dim,
            config.positions,
            base=config.rope_base,
            scaling=config.scaling,
            device=cache.device,
        )
        self.words = get("model.embed_tokens.weight", (config.vocab, config.channels))
        self.head = self.words if config.tied else get("lm_head.weight", (config.vocab, config.channels))
        self.norm_first = get("model.layers.0.input_layernorm.weight", (config.channels,))
        self.layers: list[Layer] = []
        for index in range(config.layers):
            norm = self.layers[-1].norm_next if self.layers else self.norm_first
            self.layers.append(Layer(index, config, get, norm, tables, cache))
        self._joined_layers = [lz.batched(layer.rows) for layer in self.layers]
        self._joined_first = lz.batched(self.first)
        self._joined_last = lz.batched(self.last)
        self._joined_step = lz.batched(self.steps)
        self._joined_next = lz.batched(self.nexts)
        self._joined_every = lz.batched(self.everys)
        self._awaited = [partial(layer.forward, AWAITED) for layer in self.layers]
        self._blocking = [partial(layer.forward, BLOCKING) for layer in self.layers]

    def sequence(self, tokens: int) -> PagedSequence:
        """Open a sequence with pages for so many tokens; a context manager that gives them back.

        Raises: ValueError: the model, or the pool, could never hold it. PagesExhaustedError: it cannot now.
        """
        most = self.config.positions
        if tokens > most:
            raise ValueError(f"tokens needs at most {most}, the model's positions, got {tokens}")
        return self.cache.sequence(tokens)

    async def step(self, ids: Tensor, span: Span) -> Tensor:
        """The logits (1, V) after the tokens `ids` (n,) of one sequence, which `span` gives places to."""
        if self.per == "step":
            logits: Tensor = await self._joined_step(ids, span)
            return logits
        if self.per == "layer":
            x = await lz.embedding(ids, self.words)
            for layer in self._joined_layers:
                x = await layer(x, span)
            normed = await lz.rms_norm(x[-1:], self.layers[-1].norm_next, eps=self.config.eps)
            return await lz.linear(normed, self.head)
        return await self.forward(AWAITED, self._awaited, ids, self.cache.rows([span]))

    async def next(self, ids: Tensor, span: Span, draw: Draw) -> Tensor:
        """The token (1,) that follows `ids` (n,) of one sequence.

        A step and its draw are one await; layer by layer the first one looks the tokens up and the last one
        draws.
        """
        if self.per == "step" or (self.per == "layer" and len(self.layers) == 1):
            token: Tensor = await self._joined_next(ids, span, draw)
            return token
        if self.per == "layer":
            x = await self._joined_first(ids, span)
            for layer in self._joined_layers[1:-1]:
                x = await layer(x, span)
            last: Tensor = await self._joined_last(x, span, draw)
            return last
        logits = await self.step(ids, span)
        sampled: Tensor = await lz.sample(
            logits, temperature=draw.temperature, top_p=draw.top_p, seed=draw.seed, offset=draw.offset
        )
        return sampled

    async def forward(
        self,
        ops: Ops,
        layers: Sequence[Callable[..., Awaitable[Any]]],
        ids: Tensor,
        at: Rows,
    ) -> Tensor:
        """The logits (B, V) of each sequence's last row among `ids` (T,)."""
        x = await ops.embedding(ids, self.words)
        normed = await ops.rms_norm(x, self.norm_first, eps=self.config.eps)
        for layer in layers:
            normed, x = await layer(normed, x, at)
        logits: Tensor = await ops.linear(normed[at.last], self.head)
        return logits

    async def every(self, ids: Tensor, span: Span) -> Tensor:
        """The logits (n, V) after each of the tokens `ids` (n,), as a verified draft needs them."""
        logits: Tensor = await self._joined_every(ids, span)
        return logits

    def everys(self, ids: Tensor, spans: list[Span]) -> Tensor:
        """`every` for all callers at once: (T, V)."""
        at = replace(self.cache.rows(spans), last=slice(None))
        return finished(self.forward(BLOCKING, self._blocking, ids, at))

    def steps(self, ids: Tensor, spans: list[Span]) -> Tensor:
        """`step` for all callers at once: (B, V)."""
        return finished(self.forward(BLOCKING, self._blocking, ids, self.cache.rows(spans)))

    def nexts(self, ids: Tensor, spans: list[Span], draws: list[Draw]) -> Tensor:
        """`next` for all callers at once: (B,)."""
        return tokens(finished(self.forward(BLOCKING, self._blocking, ids, self.cache.rows(spans))), draws)

    def first(self, ids: Tensor, spans: list[Span]) -> Tensor:
        """The first layer of the tokens `ids` (T,) of all callers: (T, C)."""
        return self.layers[0].rows(lz.sync.embedding(ids, self.words), spans)

    def last(self, x: Tensor, spans: list[Span], draws: list[Draw]) -> Tensor:
        """The last layer, and the token that follows each caller's last row: (B,)."""
        normed, _ = self.layers[-1].both(x, spans)
        return tokens(lz.sync.linear(normed[self.cache.rows(spans).last], self.head), draws)


def load(
    folder: Path = FOLDER,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    pages: int = 512,
    page_size: int = 16,
    per: Per = "step",
) -> Llama:
    """Load a Hugging Face Llama folder onto `device` with a pool of `pages` pages.

    Raises: ValueError: the folder's model is no Llama. FileNotFoundError: a file is missing.
    """
    config = Config.read(folder)
    get = weights_of(folder, device, dtype)
    return Llama(config, get, pool(config, device, dtype, pages, page_size), per)


def weights_of(folder: Path, device: torch.device | str, dtype: torch.dtype) -> Get:
    """How to get the weights of a Hugging Face folder, each by its name and with the shape it must have."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        places_of: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    else:
        with safe_open(str(folder / "model.safetensors"), framework="pt") as weights:
            places_of = dict.fromkeys(weights.keys(), "model.safetensors")
    opened = {name: safe_open(str(folder / name), framework="pt") for name in set(places_of.values())}

    def get(name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in places_of:
            raise ValueError(f"folder needs the weight {name}, got none in {folder}")
        weight: Tensor = opened[places_of[name]].get_tensor(name)  # type: ignore[no-untyped-call]
        if weight.shape != shape:
            raise ValueError(f"{name} needs shape {shape}, got {tuple(weight.shape)} in {folder}")
        return weight.to(device, dtype)

    return get


def random(
    config: Config,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    pages: int = 512,
    page_size: int = 16,
    per: Per = "step",
    seed: int = 0,
) -> Llama:
    """A Llama of `config`'s shape with random weights, for measurements."""
    generator = torch.Generator(device).manual_seed(seed)

    def get(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, device=device, dtype=dtype)
        scale = shape[-1] ** -0.5
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(scale)

    return Llama(config, get, pool(config, device, dtype, pages, page_size), per)


def pool(
    config: Config, device: torch.device | str, dtype: torch.dtype, pages: int, page_size: int
) -> PagedCache:
    """The pages that a model of `config` keeps its keys and values in."""
    spec = Spec(config.kv_heads, config.head_dim, dtype=dtype, device=device)
    return PagedCache(spec, pages=pages, page_size=page_size, layers=config.layers)
