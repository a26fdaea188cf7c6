"""Backends: one file each, the only place that imports a vendor's library; they do not know each other.

A new backend is one file with `KERNELS`, one line in `BUILTIN` (its file and its ops) and a test file. A
third party announces its own in an entry point (`layerzero/backends/plugins.py`).
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Collection, Iterable, Mapping
from itertools import count
from types import MappingProxyType

from layerzero._util import log
from layerzero._util.version import installed_version
from layerzero.backends.plugins import ENTRY_POINT_GROUP as ENTRY_POINT_GROUP
from layerzero.backends.plugins import Plugin as Plugin
from layerzero.backends.plugins import PluginRequest as PluginRequest
from layerzero.backends.plugins import installed_plugins as installed_plugins
from layerzero.backends.plugins import load_plugin_ops as load_plugin_ops
from layerzero.backends.plugins import plugin_kernels
from layerzero.backends.reference import reference_kernel
from layerzero.ops import table
from layerzero.ops.op import OPS
from layerzero.spec.errors import ConfigurationError, LayerZeroError
from layerzero.spec.kernel import Kernel, version
from layerzero.spec.reasons import Reason, Rejected

_REFUSED = count(1)  # plugins, in this process

# The backends, and the ops that each has kernels for: a call imports the files that can serve it, no others.
_OPS_OF = {
    "cuda_kernels": "paged_attention quantized_linear",
    "flash_attn": "attention paged_attention ragged_attention",
    "flashinfer.attention": "attention paged_attention ragged_attention",
    "flashinfer.mla": "mla_attention",
    "flashinfer.norm_rope": "add_rms_norm append_kv mlp quantized_linear rms_norm rope",
    "flashinfer.sampling": "sample sample_topk sample_topp",
    "liger": "add_rms_norm cross_entropy layer_norm linear_cross_entropy mlp rms_norm rope",
    "native": "append_kv mla_attention paged_attention ragged_attention",
    "native.packed": "linear mlp rms_norm_linear",
    "native.products": "linear mlp",
    "native.quantized": "fused_experts quantized_linear",
    "native.rows": "add_rms_norm rms_norm rope rope_append_kv",
    "onednn": "linear mlp",
    "reference": " ".join(table.FILES),
    "torch_kernels.native": "add_layer_norm add_rms_norm append_kv cross_entropy embedding layer_norm linear "
    "linear_cross_entropy mlp rms_norm",
    "torch_kernels.experts": "fused_experts select_experts",
    "torch_kernels.flex": "attention",
    "torch_kernels.moe": "moe",
    "torch_kernels.quantized": "dequantize quantize quantized_linear",
    "torch_kernels.ragged": "ragged_attention",
    "torch_kernels.sdpa": "attention",
    "triton_kernels": "add_rms_norm add_rms_norm_quantize append_kv attention fused_experts mla_attention "
    "mlp paged_attention quantize quantized_linear ragged_attention rope rope_append_kv sample sample_topk "
    "sample_topp verify_chain",
    "vllm_products": "quantized_linear",
    "xformers": "attention",
    "zentorch": "add_rms_norm attention linear moe quantized_linear rms_norm",
}
_PACKAGE = "layerzero.backends."
BUILTIN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {_PACKAGE + name: tuple(ops.split()) for name, ops in _OPS_OF.items()}
)
# What serves GPUs alone: the first call of a process on a CPU does not wait for their descriptions.
_GPU_LIBRARIES = ("cuda_kernels", "flash_attn", "flashinfer", "vllm_products", "xformers")
CUDA_ALONE = frozenset(_PACKAGE + name for name in _OPS_OF if name.startswith(_GPU_LIBRARIES))


def load_builtin(
    allowed_plugins: Collection[str] = (), *, op: str | None = None, platform: str | None = None
) -> list[Kernel]:
    """The kernels of the built-in backends and of the plugins in `allowed_plugins`, by entry point name.

    Every op's, or those of `op`; with a platform, without the backends that are for another one alone.
    Imports the modules that describe kernels, never a vendor's library.
    Raises: BackendNotAvailableError: an allowed plugin is not installed or does not import.
        ConfigurationError: two kernels have one id, or a plugin gives something else than kernels.
    """
    kernels: list[Kernel] = []
    for name, ops in BUILTIN.items():
        if platform not in (None, "cuda") and name in CUDA_ALONE:
            continue
        if op is None:
            kernels.extend(kernel for each in ops for kernel in _of_module(name, each))
        elif op in ops:
            kernels.extend(_of_module(name, op))
    kernels.extend(k for k in load_plugins(allowed_plugins) if op in (None, k.op))
    of_plugins = [name for name in OPS if name not in table.FILES and op in (None, name)]
    kernels.extend(reference_kernel(OPS[name]) for name in of_plugins)
    seen: set[str] = set()
    for kernel in kernels:
        if kernel.id in seen:
            raise ConfigurationError(f"two kernels are named {kernel.id!r}; ids need to be unique")
        seen.add(kernel.id)
    return kernels


def _of_module(name: str, op: str) -> Iterable[Kernel]:
    if name == "layerzero.backends.reference":
        return (reference_kernel(table.get(op)),)
    return (kernel for kernel in importlib.import_module(name).KERNELS if kernel.op == op)


def is_builtin(kernel: Kernel) -> bool:
    """Whether a kernel is one of ours, whatever its id; a user's or a plugin's is not."""
    return any(kernel.load is ours.load for ours in load_builtin(op=kernel.op))


def load_plugins(names: Collection[str]) -> list[Kernel]:
    """The kernels of the plugins in `names`, by entry point name; their ops are known from then on.

    Those of another environment (`alias=name@/python`) are not of this process, and left out. What is
    refused is logged, with how many there were.
    Raises: BackendNotAvailableError: one is not installed, or does not import or answer. ConfigurationError:
        two distributions announce it, it gives no kernels of known ops, or a kernel's id is taken.
    """
    here = [request.name for request in map(PluginRequest.parse, names) if not request.python]
    try:
        load_plugin_ops(here)
        kernels = [kernel for name in sorted(set(here)) for kernel in plugin_kernels(name)]
        need_own_ids(kernels, names)
    except LayerZeroError as error:
        log.warning("plugin.refused", plugins=", ".join(here), why=str(error), refused=next(_REFUSED))
        raise
    return kernels


def need_own_ids(kernels: Iterable[Kernel], names: Collection[str]) -> None:
    """Refuse kernels of the plugins in `names` that have the id of a built-in one or of each other.

    Raises: ConfigurationError: by the id.
    """
    builtin_ids = {k.id for op in {kernel.op for kernel in kernels} for k in load_builtin(op=op)}
    for kernel in kernels:
        if kernel.id in builtin_ids:
            allowed = ", ".join(sorted(set(names)))
            raise ConfigurationError(
                f"two kernels are named {kernel.id!r}; ids need to be unique, also of plugins: {allowed}"
            )
        builtin_ids.add(kernel.id)


def availability(kernel: Kernel) -> list[Rejected]:
    """Why `kernel`'s libraries cannot serve here, from installed metadata alone; empty where they can."""
    verdicts = (_check_distribution(requirement) for requirement in kernel.distributions)
    states = [verdict for verdict in verdicts if verdict is not None]
    if kernel.isolated and not table.get(kernel.op).pure:
        # Operands are copied on their way: what would be written there is lost here.
        needs = "an op that writes none of its operands"
        states.append(Rejected(Reason.ISOLATION_UNSUPPORTED, "isolate", needs, kernel.op))
    for first, second in kernel.co_requirements:
        if installed_version(first) and not installed_version(second):
            fix = f"pip install '{second}', or pip uninstall '{first}'"
            states.append(Rejected(Reason.BACKEND_MISSING, second, f"beside {first}", "not installed", fix))
    return states


# `name`, `name>=1.2`, `name>=1.2,<2`: what nearly every kernel asks for, compared by numbers alone.
_SIMPLE = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)"
    r"(?:>=(?P<least>\d+(?:\.\d+)*))?(?:,?<(?P<below>\d+(?:\.\d+)*))?"
)
_NAMED = re.compile(r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?=\s*(?:$|[<>=!~]))")
_RELEASE = re.compile(r"\d+(?:\.\d+)*(?:\+.*)?")


def _satisfies_simple(text: str) -> bool:
    """Whether an installed release satisfies a plain requirement; False also where that takes a closer look.

    `packaging` decides everything else, but importing it would delay the first call of a process.
    """
    simple = _SIMPLE.fullmatch(text)
    if simple is None:
        return False
    installed = installed_version(simple["name"])
    if installed is None or not _RELEASE.fullmatch(installed):
        return False
    version, lower, below = (_numbers(v) for v in (installed, simple["least"], simple["below"]))
    return lower <= version and (not below or version < below)


def _numbers(text: str | None) -> tuple[int, ...]:
    """A version's numbers without trailing zeros, so that 2.13 and 2.13.0 are equal."""
    numbers = list(version(text or ""))
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


@functools.cache
def _check_distribution(text: str) -> Rejected | None:
    if _satisfies_simple(text):
        return None
    named = _NAMED.match(text)
    if named is not None and installed_version(named["name"]) is None:
        needs = text[named.end() :].strip() or "any version"
        fix = f"pip install '{text}'"
        return Rejected(Reason.BACKEND_MISSING, named["name"], needs, "not installed", fix)
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise ConfigurationError(f"distributions needs requirement strings, got {text!r}: {error}") from error
    needs, fix = str(requirement.specifier) or "any version", f"pip install '{text}'"
    installed = installed_version(requirement.name)
    if installed is None:
        return Rejected(Reason.BACKEND_MISSING, requirement.name, needs, "not installed", fix)
    if requirement.specifier.contains(installed, prereleases=True):
        return None
    return Rejected(Reason.BACKEND_VERSION_MISMATCH, requirement.name, needs, installed, fix)
