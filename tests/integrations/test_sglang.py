"""The backend for SGLang, over stand-ins of the classes that it extends, and over its own where they are.

SGLang needs a GPU; its classes can be had without one where its wheel and what that imports are on the path.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import layerzero as lz
from layerzero.integrations import engine_pages
from layerzero.ops.paged.attention import paged_attention_reference
from layerzero.runtime import ACTIVE

HEADS, KEY_HEADS, WIDTH, SLOTS = 4, 2, 16, 144
LENGTHS = [1, 16, 37]
REGISTERED: dict[str, Any] = {}
CHOICES = ["fa3", "triton"]
SWITCHES = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False))
OURS = ("layerzero.integrations.sglang", "layerzero.integrations.sglang_attention")


class Kinds(Enum):
    """SGLang's kinds of attention."""

    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class Place:
    """Where keys and values of a batch go."""

    @staticmethod
    def for_layer(batch: Any, layer: Any, *, swa_loc: Any = None) -> Tensor:
        """The slots."""
        slots: Tensor = batch.out_cache_loc
        return slots


class Pool:
    """Keys and values by slot."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.k, self.v = torch.randn(2, SLOTS, KEY_HEADS, WIDTH, generator=generator)

    def set_kv_buffer(self, layer: Any, place: Tensor, k: Tensor, v: Tensor, *scales: Any) -> None:
        """Write."""
        self.k[place], self.v[place] = k, v


class Own:
    """SGLang's FlashAttention: it says that it ran."""

    def __init__(self, runner: Any, fa_impl_ver: int) -> None:
        self.runner, self.fa_impl_ver, self.page_size = runner, fa_impl_ver, runner.page_size
        self.token_to_kv_pool, self.kv_cache_dtype = runner.token_to_kv_pool, runner.kv_cache_dtype
        self.use_mla = self.is_encoder_decoder = self.is_prefill_aware_swa = False
        self.local_attn_builder = self._kv_shard_pool = None
        for name, value in runner.more.items():
            setattr(self, name, value)
        self.forward_metadata: Any = None

    def get_paged_mha_kv_cache(self, layer: Any) -> tuple[Tensor, Tensor]:
        """The pool in pages."""
        shape = -1, self.page_size, KEY_HEADS, WIDTH
        return self.token_to_kv_pool.k.view(shape), self.token_to_kv_pool.v.view(shape)

    def forward_decode(self, q: Tensor, *args: Any, **named: Any) -> Tensor:
        """A number that nothing else gives."""
        return torch.full_like(q, -7.0)


def module(name: str, **names: Any) -> ModuleType:
    """A module of these names."""
    made = ModuleType(name)
    for key, value in names.items():
        setattr(made, key, value)
    return made


def registering(name: str) -> Any:
    """What `register_attention_backend` does."""
    return lambda create: REGISTERED.setdefault(name, create)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The integration over stand-ins; nothing of it stays."""
    REGISTERED.clear()
    CHOICES[:] = ["fa3", "triton"]
    attention = "sglang.srt.layers.attention"
    parts: dict[str, dict[str, Any]] = {
        "sglang": {}, "sglang.srt": {}, "sglang.srt.arg_groups": {}, "sglang.srt.layers": {},
        "sglang.srt.mem_cache": {}, attention: {},
        "sglang.srt.arg_groups.choices": {
            "ATTENTION_BACKEND_CHOICES": CHOICES, "add_attention_backend_choices": CHOICES.extend
        },
        f"{attention}.attention_registry": {"register_attention_backend": registering},
        f"{attention}.flashattention_backend": {"FlashAttentionBackend": Own},
        "sglang.srt.layers.radix_attention": {"AttentionType": Kinds},
        "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": Place},
        "sglang.srt.runtime_context": {"get_exec": lambda: SWITCHES},
        "sglang.srt.utils": {"get_device_capability": lambda: (9, 0)},
    }  # fmt: skip
    for name, names in parts.items():
        monkeypatch.setitem(sys.modules, name, module(name, **names))
    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    engine_pages._note_own.cache_clear()
    with lz.start(lz.Settings(device="cpu", warm="off", perfdb=None)):
        yield importlib.import_module(OURS[0])
    for name in OURS:
        sys.modules.pop(name, None)


def made(plugin: Any, page: int = 16, **more: Any) -> Any:
    """A backend over a pool, with a decode step of three sequences described."""
    runner = SimpleNamespace(page_size=page, token_to_kv_pool=Pool(), kv_cache_dtype=torch.float32, more=more)
    backend = plugin.create(runner)
    tables = torch.randperm(SLOTS // page, generator=torch.Generator().manual_seed(1))
    tables = tables[: 3 * (SLOTS // page // 3)].view(3, -1).int()
    backend.forward_metadata = SimpleNamespace(
        page_table=tables, cache_seqlens_int32=torch.tensor(LENGTHS).int(), swa_out_cache_loc=None
    )
    return backend


def layer(**changes: Any) -> Any:
    """A layer as SGLang describes it."""
    fields: dict[str, Any] = {
        "tp_q_head_num": HEADS, "head_dim": WIDTH, "qk_head_dim": WIDTH, "v_head_dim": WIDTH, "scaling": 0.2,
        "attn_type": Kinds.DECODER, "is_cross_attention": False, "sliding_window_size": -1, "logit_cap": 0.0,
        "k_scale": None, "v_scale": None,
    }  # fmt: skip
    return SimpleNamespace(**fields | changes)


def step(backend: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Queries, new keys and values, and the batch: each sequence's last slot is written."""
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(3, HEADS * WIDTH, generator=generator)
    k, v = torch.randn(2, 3, KEY_HEADS, WIDTH, generator=generator)
    tables, page = backend.forward_metadata.page_table, backend.page_size
    last = [int(tables[row, (n - 1) // page]) * page + (n - 1) % page for row, n in enumerate(LENGTHS)]
    return q, k, v, SimpleNamespace(out_cache_loc=torch.tensor(last), spec_info=None)


def right(backend: Any, q: Tensor, pages: tuple[Tensor, Tensor], scale: float) -> Tensor:
    """What the reference gives for a step over pages that hold the new keys already."""
    metadata, heads = backend.forward_metadata, q.view(3, HEADS, WIDTH)
    tables, lengths = metadata.page_table, metadata.cache_seqlens_int32
    output = paged_attention_reference(heads, *pages, tables, lengths, scale=scale)
    assert isinstance(output, Tensor)
    return output.view(3, -1)


def counted() -> float:
    """How many calls have stayed with SGLang."""
    return sum(device.counters.total("own_attention") for device in ACTIVE.devices.values())


@pytest.mark.parametrize("page", [1, 16])
def test_a_decode_step_is_ours(plugin: Any, page: int) -> None:
    """New keys are written first; rows of several lengths give what the reference gives."""
    backend = made(plugin, page)
    q, k, v, batch = step(backend)
    output = backend.forward_decode(q, k, v, layer(), batch)
    assert torch.equal(backend.token_to_kv_pool.k[batch.out_cache_loc], k)
    torch.testing.assert_close(output, right(backend, q, backend.get_paged_mha_kv_cache(None), 0.2))
    assert lz.last_selection().op == "paged_attention" and counted() == 0  # type: ignore[union-attr]


def test_keys_that_somebody_else_has_written_stay_and_an_output_of_sglangs_is_filled(plugin: Any) -> None:
    """`save_kv_cache=False` writes none; memory that the batch brings holds the result."""
    backend = made(plugin)
    q, k, v, batch = step(backend)
    before = backend.token_to_kv_pool.k.clone()
    batch._attn_output = torch.zeros(3, HEADS * WIDTH)
    output = backend.forward_decode(q, k, v, layer(), batch, save_kv_cache=False)
    assert (
        torch.equal(backend.token_to_kv_pool.k, before) and output.data_ptr() == batch._attn_output.data_ptr()
    )
    torch.testing.assert_close(
        batch._attn_output, right(backend, q, backend.get_paged_mha_kv_cache(None), 0.2)
    )


@pytest.mark.parametrize(
    ("changes", "asked", "reason"),
    [
        ({"attn_type": Kinds.ENCODER_ONLY}, {}, "encoder_only"),
        ({"is_cross_attention": True}, {}, "cross attention"),
        ({"sliding_window_size": 128}, {}, "sliding window"),
        ({"sliding_window_size": 0}, {}, "sliding window"),
        ({"logit_cap": 30.0}, {}, "soft cap"),
        ({"v_head_dim": 8}, {}, "another width"),
        ({"tp_q_head_num": 2}, {}, "several queries"),
        ({}, {"sinks": torch.ones(HEADS)}, "sinks"),
        ({}, {"return_lse": True}, "return_lse"),
        ({}, {"rel_bias": torch.ones(1)}, "rel_bias"),
    ],
)
def test_layers_that_ask_for_more_stay_with_sglang(
    plugin: Any,
    changes: dict[str, Any],
    asked: dict[str, Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its own kernel runs, each call is counted, and the log says why, once."""
    backend = made(plugin)
    q, k, v, batch = step(backend)
    with caplog.at_level(logging.INFO, "layerzero"):
        for _ in range(2):
            assert (backend.forward_decode(q, k, v, layer(**changes), batch, **asked) == -7.0).all()
    assert caplog.text.count("engine.own_attention") == 1 and reason in caplog.text
    assert counted() == 2


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"use_mla": True}, "latent"),
        ({"is_encoder_decoder": True}, "an encoder"),
        ({"local_attn_builder": object()}, "chunks"),
        ({"is_prefill_aware_swa": True}, "spares prompts"),
        ({"_kv_shard_pool": object()}, "over ranks"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "float8_e4m3fn"),
    ],
)
def test_models_that_ask_for_more_stay_with_sglang(plugin: Any, more: dict[str, Any], reason: str) -> None:
    """No batch of theirs is ours; nor are drafts, nor is anything where SGLang promises determinism."""
    backend = made(plugin, **more)
    q, k, v, batch = step(backend)
    assert reason in backend.why_not(q, layer(), batch, {})
    assert (backend.forward_decode(q, k, v, layer(), batch) == -7.0).all()


def test_drafts_and_promised_determinism_stay_with_sglang(
    plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by the batch, the other by SGLang's switch."""
    backend = made(plugin)
    q, _, _, batch = step(backend)
    batch.spec_info = object()
    assert backend.why_not(q, layer(), batch, {}) == "drafts"
    monkeypatch.setattr(SWITCHES.deterministic, "enable_deterministic_inference", True)
    assert "determinism" in made(plugin).why_not(q, layer(), batch, {})


def test_it_registers_once_and_takes_nobodys_name(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang calls it in each process; another plugin stays. Blackwell has FlashAttention 4."""
    plugin.register()
    plugin.register()
    assert CHOICES == ["fa3", "triton", "layerzero"] and REGISTERED.get("layerzero") is plugin.create
    assert made(plugin).fa_impl_ver == 3
    monkeypatch.setattr(plugin, "get_device_capability", lambda: (10, 0))
    assert made(plugin).fa_impl_ver == 4
    REGISTERED.clear()
    plugin.register()
    assert REGISTERED == {}


@pytest.mark.parametrize("page", [1, 16])
def test_a_decode_step_over_sglangs_own_pool_and_metadata(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its class describes the batch and its pool holds the keys; its kernels alone are stand-ins."""
    for name in ("sgl_kernel", "sgl_kernel.flash_attn"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    base = pytest.importorskip("sglang.srt.layers.attention.flashattention_backend", exc_type=ImportError)
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from layerzero.integrations import sglang, sglang_attention

    settings: dict[str, Any] = {
        "get_parallel": {
            "attn_cp_size": 1, "attn_tp_size": 1, "enable_prefill_cp": False, "attn_dp_enabled": False
        },
        "get_spec": {
            "speculative_eagle_topk": None, "speculative_num_draft_tokens": None,
            "speculative_algorithm": None,
        },
        "get_exec": vars(SWITCHES), "get_model": {"is_embedding": False},
        "get_schedule": {"chunked_prefill_size": 2048}, "get_memory": {"disable_radix_cache": False},
    }  # fmt: skip
    for name, fields in settings.items():
        monkeypatch.setattr(base, name, lambda fields=fields: SimpleNamespace(**fields))
    monkeypatch.setattr(sglang_attention, "get_exec", lambda: SWITCHES)
    for part in (base, sglang):
        monkeypatch.setattr(part, "get_device_capability", lambda: (9, 0))
    pool = MHATokenToKVPool(128, page, torch.float32, KEY_HEADS, WIDTH, 1, "cpu", False)
    requests = ReqToTokenPool(8, 64, "cpu", False)
    config = SimpleNamespace(
        is_encoder_decoder=False, context_len=64, attention_arch=base.AttentionArch.MHA, head_dim=WIDTH,
        is_local_attention_model=False, get_num_kv_heads=lambda ranks: KEY_HEADS,
        hf_text_config=SimpleNamespace(num_attention_heads=HEADS),
    )  # fmt: skip
    backend = sglang.create(
        SimpleNamespace(
            model_config=config, sliding_window_size=None, device="cpu", req_to_token_pool=requests,
            token_to_kv_pool=pool, kv_cache_dtype=torch.float32, kv_cache_dtype_str="auto", page_size=page,
            kv_index_translator=SimpleNamespace(is_translating=False), is_draft_worker=False,
        )
    )  # fmt: skip
    backend._get_scheduler_metadata = None  # of its kernel
    generator = torch.Generator().manual_seed(0)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.normal_(generator=generator)
    lengths = torch.tensor(LENGTHS)
    pages, first = torch.randperm(128 // page, generator=generator) + 1, 0
    for row, length in enumerate(LENGTHS, 1):
        count = -(-length // page)
        slots = (pages[first : first + count, None] * page + torch.arange(page)).flatten()[:length]
        requests.req_to_token[row, :length] = slots.int()
        first += count
    rows = torch.arange(1, 4)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE, batch_size=3, seq_lens=lengths, seq_lens_cpu=lengths, spec_info=None,
        req_pool_indices=rows, out_cache_loc=requests.req_to_token[rows, lengths - 1].long(),
        encoder_lens=None, attn_cp_metadata=None, kv_loc_plan=None, dcp_kv_mask=None,
        extend_prefix_lens_cpu=None, out_cache_loc_is_physical=False,
    )  # fmt: skip
    backend.init_forward_metadata(batch)
    q = torch.randn(3, HEADS * WIDTH, generator=generator)
    k, v = torch.randn(2, 3, KEY_HEADS, WIDTH, generator=generator)
    with lz.start(lz.Settings(device="cpu", warm="off", perfdb=None)):
        output = backend.forward_decode(q, k, v, RadixAttention(HEADS, WIDTH, 0.2, KEY_HEADS, 0), batch)
        assert counted() == 0
    assert torch.equal(pool.k_buffer[0][batch.out_cache_loc], k)
    layers = pool.get_kv_buffer(0)
    for row, length in enumerate(LENGTHS):
        slots = requests.req_to_token[row + 1, :length].long()
        keys, values = (held[slots].transpose(0, 1) for held in layers)
        one = q[row].view(HEADS, 1, WIDTH)
        wanted = scaled_dot_product_attention(one, keys, values, scale=0.2, enable_gqa=True)
        torch.testing.assert_close(output[row], wanted.flatten(), rtol=1e-5, atol=1e-5)
