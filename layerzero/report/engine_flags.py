"""The flags by which vLLM and SGLang choose kernels, as data: what each choice runs.

Sources: vllm 0.33.0, config/{attention,kernel,cache}.py and v1/attention/backends/registry.py; sglang 0.5.23,
srt/arg_groups/choices.py and srt/server_args.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

import msgspec

FP8_CACHE = "float8_e4m3fn"


class FlagValue(msgspec.Struct, frozen=True):
    """One value of a flag: the kernels, as globs, that it runs on compute capabilities `sm`, ends included.

    Without kernels it is a value that the engine has and no kernel here is timed for. `like` are kernels of
    our own that do the same work in other code: shown, never counted.
    """

    value: str
    kernels: tuple[str, ...] = ()
    like: tuple[str, ...] = ()
    sm: tuple[int, int] = (50, 999)

    def runs(self, kernel: str) -> bool:
        """Whether the engine runs this very kernel for the value."""
        return any(fnmatchcase(kernel, glob) for glob in self.kernels)

    def resembles(self, kernel: str) -> bool:
        """Whether a kernel of ours is like the engine's for the value."""
        return any(fnmatchcase(kernel, glob) for glob in self.like)


class Flag(msgspec.Struct, frozen=True):
    """A flag, the parts of serving that it decides, and its values, the engine's first preference first."""

    name: str
    parts: tuple[str, ...]
    choices: tuple[FlagValue, ...]
    latent: tuple[FlagValue, ...] = ()


class Engine(msgspec.Struct, frozen=True):
    """An engine's command and its flags."""

    command: str
    flags: tuple[Flag, ...]


_FA2, _FA3, _FA4 = ("flash_attn_2.*",), ("vllm_flash_attn_3.*", "flash_attn_3.*"), ("flash_attn_4.*",)
_FLASHINFER = ("flashinfer.*.fa2", "flashinfer.*.fa3")
_TRITON = ("triton.paged_attention.decode",)
_CODES = ("triton.paged_attention.decode_codes", "cuda.paged_attention.codes")
_VLLM_ATTENTION = (
    FlagValue("FLASH_ATTN", _FA2, sm=(80, 89)),
    FlagValue("FLASH_ATTN", _FA3, sm=(90, 99)),
    FlagValue("FLASH_ATTN", _FA4, sm=(100, 119)),
    FlagValue("FLASHINFER", _FLASHINFER, sm=(75, 999)),
    FlagValue("TRITON_ATTN", like=_TRITON),
    FlagValue("FLEX_ATTENTION"),
)
_VLLM_LATENT = tuple(map(FlagValue, ("FLASHMLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "TRITON_MLA")))
_SGLANG_ATTENTION = (
    FlagValue("fa3", _FA3, sm=(80, 99)),
    FlagValue("flashinfer", _FLASHINFER, sm=(75, 999)),
    FlagValue("fa4", _FA4, sm=(90, 119)),
    FlagValue("triton", like=_TRITON),
    FlagValue("torch_native", like=("torch.attention.sdpa",)),
    FlagValue("flex_attention"),
)
_SGLANG_LATENT = (FlagValue("fa3"), FlagValue("flashinfer", _FLASHINFER, sm=(75, 999)), FlagValue("triton"))

ENGINES: Mapping[str, Engine] = MappingProxyType(
    {
        "vllm": Engine(
            "vllm serve",
            (
                Flag("--attention-backend", ("prefill", "decode"), _VLLM_ATTENTION, _VLLM_LATENT),
                Flag("--kv-cache-dtype", ("kv",), (FlagValue("fp8_e4m3", like=_CODES),)),
                Flag(
                    "--moe-backend",
                    ("moe",),
                    (FlagValue("triton", like=("torch.moe.grouped",)), FlagValue("flashinfer_cutlass")),
                ),
                Flag("--linear-backend", ("linear",), ()),
            ),
        ),
        "sglang": Engine(
            "python -m sglang.launch_server --model-path",
            (
                Flag("--prefill-attention-backend", ("prefill",), _SGLANG_ATTENTION, _SGLANG_LATENT),
                Flag("--decode-attention-backend", ("decode",), _SGLANG_ATTENTION, _SGLANG_LATENT),
                Flag("--kv-cache-dtype", ("kv",), (FlagValue("fp8_e4m3", like=_CODES),)),
                Flag(
                    "--moe-runner-backend",
                    ("moe",),
                    (FlagValue("triton", like=("torch.moe.grouped",)), FlagValue("flashinfer_cutlass")),
                ),
                Flag("--fp8-gemm-backend", ("linear",), ()),
            ),
        ),
    }
)
