"""Choose, explain and run the fastest healthy kernel for an operation, and batch awaited calls.

General layout, from the top down (a module imports only what stands below it):

    api, sync     the public functions: thin
    runtime       opens and closes everything; the only place that wires parts together
    lanes         what a lane runs a batch with
    scheduler     lanes, batching, modes, single flight (asyncio in one file)
    actors        the device of this process: kernels, health, plans
    dispatch      the hot path; read it first
    selection     judge all kernels, price, decide, trace
    policy, health, telemetry, backends, kernel, ops, hardware, settings, log, reasons, errors
"""

from layerzero import sync as sync
from layerzero.api.awaiting import awaited as _awaited
from layerzero.api.batched import batched as batched
from layerzero.api.binding import bind as bind
from layerzero.api.calls import last_selection as last_selection
from layerzero.api.configuration import add_policy as add_policy
from layerzero.api.configuration import configure as configure
from layerzero.api.configuration import disabled as disabled
from layerzero.api.configuration import get_config as get_config
from layerzero.api.configuration import get_locks as get_locks
from layerzero.api.configuration import load_config as load_config
from layerzero.api.configuration import load_policy as load_policy
from layerzero.api.configuration import lock as lock
from layerzero.api.configuration import prefer as prefer
from layerzero.api.configuration import reset_policy as reset_policy
from layerzero.api.configuration import unlock as unlock
from layerzero.api.host import to_host as to_host
from layerzero.api.inspection import dry_run as dry_run
from layerzero.api.inspection import explain as explain
from layerzero.api.inspection import list_kernels as list_kernels
from layerzero.api.inspection import select as select
from layerzero.api.inspection import validate as validate
from layerzero.api.inspection import which as which
from layerzero.api.start import start as start
from layerzero.doctor import doctor as doctor
from layerzero.errors import BackendNotAvailableError as BackendNotAvailableError
from layerzero.errors import CacheCorruptionError as CacheCorruptionError
from layerzero.errors import ConfigurationError as ConfigurationError
from layerzero.errors import ConsistencyError as ConsistencyError
from layerzero.errors import CudaGraphUnsafeError as CudaGraphUnsafeError
from layerzero.errors import DeadlineExceededError as DeadlineExceededError
from layerzero.errors import DeviceLostError as DeviceLostError
from layerzero.errors import KernelExecutionError as KernelExecutionError
from layerzero.errors import LayerZeroError as LayerZeroError
from layerzero.errors import ModeChangedError as ModeChangedError
from layerzero.errors import NoKernelAvailableError as NoKernelAvailableError
from layerzero.errors import NoKernelFoundError as NoKernelFoundError
from layerzero.errors import Overloaded as Overloaded
from layerzero.errors import PolicyLoadError as PolicyLoadError
from layerzero.errors import PolicyValidationError as PolicyValidationError
from layerzero.errors import RuntimeClosedError as RuntimeClosedError
from layerzero.errors import SelectionTimeoutError as SelectionTimeoutError
from layerzero.hardware import Hardware as Hardware
from layerzero.kernel import Capability as Capability
from layerzero.kernel import Efficiency as Efficiency
from layerzero.kernel import Kernel as Kernel
from layerzero.ops import table as _table
from layerzero.ops.alibi import alibi_slopes as alibi_slopes
from layerzero.ops.rope_scaling import NTK as NTK
from layerzero.ops.rope_scaling import DynamicNTK as DynamicNTK
from layerzero.ops.rope_scaling import Linear as Linear
from layerzero.ops.rope_scaling import Llama3 as Llama3
from layerzero.ops.rope_scaling import Yarn as Yarn
from layerzero.ops.rope_scaling import rope_tables as rope_tables
from layerzero.ops.rope_scaling import xpos_table as xpos_table
from layerzero.reasons import Reason as Reason
from layerzero.reasons import Rejected as Rejected
from layerzero.runtime import Runtime as Runtime
from layerzero.selection.record import Accepted as Accepted
from layerzero.selection.record import Selection as Selection
from layerzero.settings import Settings as Settings

__version__ = "0.1.0"

add_layer_norm = _awaited(_table.get("add_layer_norm"))
add_rms_norm = _awaited(_table.get("add_rms_norm"))
alibi = _awaited(_table.get("alibi"))
attention = _awaited(_table.get("attention"))
cross_entropy = _awaited(_table.get("cross_entropy"))
embedding = _awaited(_table.get("embedding"))
layer_norm = _awaited(_table.get("layer_norm"))
linear = _awaited(_table.get("linear"))
mla_attention = _awaited(_table.get("mla_attention"))
mlp = _awaited(_table.get("mlp"))
paged_attention = _awaited(_table.get("paged_attention"))
ragged_attention = _awaited(_table.get("ragged_attention"))
rms_norm = _awaited(_table.get("rms_norm"))
rope = _awaited(_table.get("rope"))
sample = _awaited(_table.get("sample"))
sample_topk = _awaited(_table.get("sample_topk"))
sample_topp = _awaited(_table.get("sample_topp"))
