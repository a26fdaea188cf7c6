"""Choose, explain and run the fastest healthy kernel for an operation, and batch awaited calls.

General layout, from the top down (a module imports only what is below it):

    cli, integrations, speculative    the `lz` command; frameworks; a draft and a target
    api, sync                         the public functions: thin
    actors.group                      the ranks of a tensor-parallel model
    calls                             how one call runs: blocking, awaited, bound, batched
    runtime, open_device              open and close everything; the only places that wire parts together
    scheduler                         batching, modes, streams, readback
    actors.remote, actors.rpc         devices in Ray actors, and the wire to them
    actors.device                     the device of this process: kernels, health, plans
    warmup, measure, observe, graphs  ready before traffic; tuning; counters and spans; CUDA graphs
    selection                         judge, price, decide, trace; read `dispatch`, the hot path, first
    health, kvcache, perfdb           breakers; KV caches; measurements on disk
    backends, ops, native             kernels; what they compute; the compiled part
    spec, _util                       values; small parts
"""

import gc
import importlib
import sys
from types import ModuleType
from typing import Any

from layerzero._util import version as _version
from layerzero.ops.files import FILES as _FILES

__version__ = _version.VERSION

# The public names that are no ops, and where each is defined. Where torch is imported already, what a call
# runs through is imported with the package; everything else when it is first used: no first call waits
# for a command's tables, and `lz --help` does not wait for torch.
_HOMES = {
    "layerzero.calls.batched": "batched",
    "layerzero.calls.bound": "bind",
    "layerzero.calls.blocking": "last_selection",
    "layerzero.api.config": (
        "add_policy configure disable get_config get_locks load_config load_policy lock prefer "
        "reset_policy unlock"
    ),
    "layerzero.calls.compile_choice": "compile_choice",
    "layerzero.calls.inlining": "CompiledChoice",
    "layerzero.api.graphs": "compile is_graph_safe rehearse_capture validate_graph_capture",
    "layerzero.api.readback": "run_ahead to_host",
    "layerzero.api.step_runner": "StepRunner",
    "layerzero.api.inspect": "dry_run explain list_kernels select select_batch validate which",
    "layerzero.actors.group.cluster": "remote_rank_group",
    "layerzero.actors.group.join": "rank_group",
    "layerzero.api.start": "start",
    "layerzero.api.timeline": "timeline",
    "layerzero.tokenization.detokenizer": "IncrementalDetokenizer",
    "layerzero.tokenization.prompts": "PromptCache",
    "layerzero.tokenization.templates": "ChatTemplate",
    "layerzero.tokenization.tokenize": "detokenize tokenize tokenize_chat",
    "layerzero.api.solve": "solve",
    "layerzero.api.tune": "record tune tune_blocking",
    "layerzero.measure.tuning": "TuneReport",
    "layerzero.api.warmup": "load_bundle readiness_check save_bundle warmup warmup_blocking",
    "layerzero.backends.hub": "Hub hub_kernel",
    "layerzero.checkpoints": "QuantizedCheckpoint load_quantized",
    "layerzero.backends.triton_kernels.user_kernel": "TritonLaunch triton_kernel",
    "layerzero.api.doctor": "doctor",
    "layerzero.spec.errors": (
        "BackendNotAvailableError BlockError BundleRefusedError CacheCorruptionError ChatTemplateError "
        "ConfigurationError ConsistencyError CudaGraphUnsafeError DeadlineExceededError DeviceLostError "
        "FileRefusedError GrammarLimitError KernelExecutionError KernelStillLoadingError LayerZeroError "
        "ModeChangedError NoKernelAvailableError NoKernelFoundError OverloadedError PlanRefusedError "
        "PolicyLoadError PolicyValidationError RuntimeClosedError SelectionTimeoutError "
        "TokenizerMismatchError UnknownOpError"
    ),
    "layerzero.formats.errors": "FormatError",
    "layerzero.formats.quantized_tensor": "QuantizedTensor",
    "layerzero.spec.hardware": "Hardware",
    "layerzero.planner.block": "Block BlockOp Edge",
    "layerzero.planner.plan": "load_plan plan",
    "layerzero.planner.planned": "PlannedBlock",
    "layerzero.planner.record": "PlanRecord",
    "layerzero.integrations": "patch patch_table unpatch",
    "layerzero.integrations.loading": "patch_on_load",
    "layerzero.spec.capability": "Capability",
    "layerzero.spec.kernel": "Efficiency Kernel",
    "layerzero.ops.attention.alibi": "alibi_slopes",
    "layerzero.ops.rope.scaling": (
        "DynamicNTKScaling LinearScaling Llama3Scaling NTKScaling YarnScaling rope_tables xpos_table"
    ),
    "layerzero.ops.sampling.logits": "adjust_logits token_logprobs",
    "layerzero.ops.sampling.verify": "tree_mask",
    "layerzero.spec.reasons": "Reason Rejected",
    "layerzero.runtime": "Runtime",
    "layerzero.selection.record": "Accepted Selection",
    "layerzero.spec.settings": "Settings",
    "layerzero.warmup.manifest": "Manifest",
    "layerzero.tokenization.tokenizer": "Tokenizer",
    "layerzero.tokenization.tokens": "Padded Tokens",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

_MODULES = {
    "kvcache": "layerzero.kvcache",
    "metrics": "layerzero.api.metrics",
    "parallel": "layerzero.parallel",
    "speculative": "layerzero.speculative",
    "sync": "layerzero.sync",
}

__all__ = sorted({*_HOME, *_FILES, *_MODULES})
_PUBLIC = frozenset(__all__)


def __getattr__(name: str) -> Any:
    """A public name, imported or made when it is first asked for."""
    if name not in _PUBLIC:
        ops = sys.modules.get("layerzero.ops.op")
        if ops is not None and name in ops.OPS:  # of a plugin that a runtime has allowed
            return _op(name)
        raise AttributeError(f"module 'layerzero' has no attribute {name!r}")
    _load()
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    value = _op(name) if name in _FILES else getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def _load() -> None:
    """Import what a call runs through, after the torch that it needs has been looked at.

    The collector rests meanwhile: what an import makes stays alive, and a full collection in between, which
    goes through all of torch's objects, is time that the first call would wait for.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("layerzero._util.requirements")
        importlib.import_module("layerzero.calls.awaited")
    finally:
        if collects:
            gc.enable()


def _op(name: str) -> Any:
    from layerzero.calls.awaited import awaitable
    from layerzero.ops import table

    return awaitable(table.get(name))


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """The package, whose public names win over its files of the same name (`doctor` is the function)."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # Code that is sent to another process by value refers to this package by name, as to any module.
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package

if "torch" in sys.modules:
    _load()
