"""The backend for vLLM, over stand-ins of the classes that it extends: vLLM itself needs a GPU.

benchmarks/vllm_plugin.py runs it inside vLLM.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.integrations import engine_pages
from layerzero.runtime import ACTIVE

HEADS, KEY_HEADS, WIDTH, PAGE, PAGES = 4, 2, 16, 16, 3
CLASSES: dict[str, str] = {}  # what vLLM was told


class Enumerated(Enum):
    """vLLM's names of backends, as far as they matter."""

    CUSTOM = "custom"

    def is_overridden(self) -> bool:
        """Whether somebody has registered a class."""
        return self.name in CLASSES


AttentionCGSupport = Enum("AttentionCGSupport", "NEVER UNIFORM_SINGLE_TOKEN_DECODE UNIFORM_BATCH ALWAYS")


class OwnImpl:
    """vLLM's own attention: it says that it ran."""

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, **given: Any) -> None:
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = (
            num_heads,
            head_size,
            scale,
            num_kv_heads,
        )
        self.alibi_slopes, self.sinks = given.get("alibi_slopes"), given.get("sinks")
        self.logits_soft_cap, self.kv_cache_dtype = given.get("logits_soft_cap", 0), given.get("kv", "auto")
        self.sliding_window = given.get("sliding_window", (-1, -1))
        self.attn_type, self.dcp_world_size = given.get("attn_type", "decoder"), given.get("dcp", 1)
        self.batch_invariant_enabled = given.get("invariant", False)

    def forward(self, *args: Any) -> Tensor:
        """Fill the output with a number that nothing else gives."""
        output: Tensor = args[6]
        return output.fill_(-7.0)


@dataclass
class Metadata:
    """A batch as vLLM's FlashAttention backend describes it."""

    num_actual_tokens: int
    seq_lens: Tensor
    block_table: Tensor
    max_query_len: int = 1
    use_cascade: bool = False
    causal: Any = True
    mm_prefix_range_tensor: Any = None
    rswa_prefix_lens: Any = None
    more: dict[str, Any] = field(default_factory=dict)


def module(name: str, **names: Any) -> ModuleType:
    """A module of these names."""
    made = ModuleType(name)
    for key, value in names.items():
        setattr(made, key, value)
    return made


def told(backend: Enumerated, path: str) -> None:
    """What `register_backend` does with a path."""
    CLASSES[backend.name] = path


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The integration over stand-ins; nothing of it stays."""
    kinds = type("AttentionType", (), {"DECODER": "decoder"})
    names = {
        "vllm": module("vllm"), "vllm.v1": module("vllm.v1"),
        "vllm.v1.attention": module("vllm.v1.attention"),
        "vllm.v1.attention.backend": module(
            "backend", AttentionCGSupport=AttentionCGSupport, AttentionType=kinds
        ),
        "vllm.v1.attention.backends": module("backends"),
        "vllm.v1.attention.backends.flash_attn": module(
            "flash_attn", FlashAttentionBackend=object, FlashAttentionImpl=OwnImpl,
            FlashAttentionMetadataBuilder=object,
        ),
        "vllm.v1.attention.backends.registry": module(
            "registry", AttentionBackendEnum=Enumerated, register_backend=told
        ),
    }  # fmt: skip
    for name, made in names.items():
        monkeypatch.setitem(sys.modules, name, made)
    monkeypatch.delitem(sys.modules, "layerzero.integrations.vllm", raising=False)
    CLASSES.clear()
    found = importlib.import_module("layerzero.integrations.vllm")
    engine_pages._note_own.cache_clear()
    with lz.start(lz.Settings(device="cpu", warm="off", perfdb=None)):
        yield found
    sys.modules.pop("layerzero.integrations.vllm", None)


def batch(lengths: list[int]) -> tuple[Tensor, Tensor, Metadata]:
    """Queries, pages as vLLM lays them out (keys and values of a token side by side), metadata."""
    count = len(lengths)
    generator = torch.Generator().manual_seed(count)
    pages = torch.randn(count * PAGES, PAGE, KEY_HEADS, 2 * WIDTH, generator=generator).transpose(1, 2)
    query = torch.randn(count + 2, HEADS, WIDTH, generator=generator)  # two rows of padding
    tables = torch.randperm(count * PAGES, generator=generator).view(count, PAGES).int()
    return query, pages, Metadata(count, torch.tensor(lengths, dtype=torch.int32), tables)


def counted() -> float:
    """How many calls have stayed with vLLM."""
    return sum(device.counters.total("own_attention") for device in ACTIVE.devices.values())


def run(impl: Any, query: Tensor, pages: Tensor, metadata: Metadata | None) -> Tensor:
    """A call as vLLM makes it."""
    output = torch.full_like(query, 5.0)
    impl.forward(torch.nn.Module(), query, query, query, pages, metadata, output)
    return output


def test_a_decode_step_is_ours(plugin: Any) -> None:
    """Rows of several lengths give what the reference gives; padding is not written."""
    query, pages, metadata = batch([1, PAGE, 2 * PAGE + 5])
    impl = plugin.ChosenImpl(HEADS, WIDTH, WIDTH**-0.5, KEY_HEADS)
    output = run(impl, query, pages, metadata)
    k, v = pages.transpose(1, 2).split(WIDTH, dim=-1)
    from layerzero.ops.paged.attention import paged_attention_reference

    right = paged_attention_reference(query[:3], k, v, metadata.block_table, metadata.seq_lens)
    torch.testing.assert_close(output[:3], right)
    assert (output[3:] == 5.0).all()
    assert impl.why_not(metadata) == "" and lz.last_selection().op == "paged_attention"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_query_len": 2}, "several queries"),
        ({"seq_lens": torch.ones(2, dtype=torch.int32)}, "several queries"),
        ({"use_cascade": True}, "common prefix"),
        ({"causal": False}, "mask other than causal"),
        ({"causal": torch.ones(3)}, "mask other than causal"),
        ({"mm_prefix_range_tensor": torch.ones(1)}, "mask other than causal"),
        ({"rswa_prefix_lens": torch.ones(1)}, "window of its own"),
    ],
)
def test_other_batches_stay_with_vllm(
    plugin: Any, change: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own kernel runs, and the log says why, once."""
    query, pages, metadata = batch([1, 2, 3])
    for name, value in change.items():
        setattr(metadata, name, value)
    impl = plugin.ChosenImpl(HEADS, WIDTH, 0.25, KEY_HEADS)
    before = counted()
    with caplog.at_level(logging.INFO, "layerzero"):
        outputs = [run(impl, query, pages, metadata) for _ in range(2)]
    assert all((output == -7.0).all() for output in outputs)
    assert reason in impl.why_not(metadata)
    assert caplog.text.count("engine.own_attention") == 1 and reason in caplog.text
    assert counted() - before == 2


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"alibi_slopes": torch.ones(HEADS)}, "alibi"),
        ({"sinks": torch.ones(HEADS)}, "sinks"),
        ({"logits_soft_cap": 30.0}, "soft cap"),
        ({"sliding_window": (128, 0)}, "sliding window"),
        ({"attn_type": "encoder"}, "encoder"),
        ({"kv": "fp8"}, "fp8"),
        ({"dcp": 2}, "context parallel"),
        ({"invariant": True}, "batch invariance"),
    ],
)
def test_layers_that_ask_for_more_stay_with_vllm(plugin: Any, given: dict[str, Any], reason: str) -> None:
    """No batch of them is ours."""
    query, pages, metadata = batch([4])
    impl = plugin.ChosenImpl(HEADS, WIDTH, 0.25, KEY_HEADS, **given)
    assert reason in impl.why_not(metadata) and (run(impl, query, pages, metadata) == -7.0).all()


def test_a_run_without_a_batch_stays_with_vllm(plugin: Any) -> None:
    """vLLM sizes its memory so; a quantized output is its own, too."""
    query, pages, metadata = batch([4])
    impl = plugin.ChosenImpl(HEADS, WIDTH, 0.25, KEY_HEADS)
    assert (run(impl, query, pages, None) == -7.0).all()
    output = torch.zeros_like(query)
    impl.forward(torch.nn.Module(), query, query, query, pages, metadata, output, torch.ones(1))
    assert (output == -7.0).all()


def test_it_registers_once_and_takes_nobodys_name(plugin: Any) -> None:
    """vLLM calls it in each process, more than once; another plugin's class stays."""
    plugin.register()
    plugin.register()
    assert CLASSES == {"CUSTOM": "layerzero.integrations.vllm.ChosenBackend"}
    CLASSES["CUSTOM"] = "somebody.else"
    plugin.register()
    assert CLASSES == {"CUSTOM": "somebody.else"}
    backend = plugin.ChosenBackend
    assert backend.get_name() == "CUSTOM" and backend.get_impl_cls() is plugin.ChosenImpl
    assert backend.get_builder_cls()._cudagraph_support.name == "UNIFORM_SINGLE_TOKEN_DECODE"
