"""SGLang's attention backend `layerzero`, by name: `sglang_attention` has what computes.

Installed beside SGLang, `register` is found by it (entry point `sglang.srt.plugins`). SGLang loads plugins in
processes that compute nothing, too: only `create` asks for its kernels.

Source: sglang 0.5.23, srt/plugins/__init__.py, srt/arg_groups/choices.py, srt/layers/attention/
attention_registry.py.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.utils import get_device_capability

NAME = "layerzero"


def register() -> None:
    """Name this backend to SGLang, unless that name is taken; called in each of its processes."""
    if NAME in ATTENTION_BACKEND_CHOICES:
        return
    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(create)


def create(runner: Any) -> Any:
    """The backend for a model runner: over FlashAttention 3 up to compute capability 9.0, over 4 after it."""
    from layerzero.integrations.sglang_attention import ChosenSGLangBackend

    generation, _ = get_device_capability()
    return ChosenSGLangBackend(runner, fa_impl_ver=3 if generation <= 9 else 4)
