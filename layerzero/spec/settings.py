"""Settings of one runtime: an immutable record from program, environment, file and defaults.

`Settings(...)` is what the program writes and reads nothing else. `Settings.load(...)` reads the environment
and the file as well; so do `lz.start()` without settings and the `lz` command, which call it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from layerzero._util import log
from layerzero._util.strict_yaml import path_in, quote, suggestion
from layerzero.spec.errors import ConfigurationError
from layerzero.spec.user_file import UserFile

FORMAT_VERSION = 1
PREFIX = "LAYERZERO_"
# Read by other modules under the same prefix; a variable outside this list and the fields is not ours.
OTHER_VARIABLES = frozenset(
    PREFIX + word for word in ("CONFIG", "LOCK", "DENY", "ALLOW", "PREFER", "AVOID", "NATIVE", "GPU_MAP")
)
SETTING_IGNORED = "setting.ignored"
SETTING_OVERRIDDEN = "setting.overridden"
SETTINGS_SKIPPED = "settings.skipped"

BATCHING = ("all", "rows", "off")
# What only opening a runtime reads.
READ_AT_START = (
    "capabilities", "cluster", "cluster_devices", "cluster_devices_per_gpu", "freeze_gc", "hang_s", "isolate",
    "isolate_timeout_s", "max_restarts", "nvtx", "placement_timeout_s", "plugins", "timeline",
)  # fmt: skip
# The types of fields, each with what it needs in the words of an error. Infinity is above the largest float.
_LARGEST = sys.float_info.max
Count = Annotated[int, Meta(ge=1, description="a whole number of at least 1")]
Whole = Annotated[int, Meta(ge=0, description="a whole number of at least 0")]
NotNegative = Annotated[float, Meta(ge=0, le=_LARGEST, description="a finite number of at least 0")]
AboveZero = Annotated[float, Meta(gt=0, le=_LARGEST, description="a finite number above 0")]
Days = Annotated[float, Meta(gt=0, lt=1e5, description="a number of days above 0")]
Share = Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")]
Text = Annotated[str, Meta(min_length=1, description="a non-empty string")]
PluginName = Annotated[str, Meta(pattern=r"\A\S(.*\S)?\Z")]
Pattern = Annotated[str, Meta(pattern=r"\A[a-z0-9_.*?\[\]!-]{1,96}\Z")]
Isolated = Annotated[str, Meta(pattern=r"\A(process|/.*\S)\Z")]
DeviceName = Annotated[
    str,
    Meta(pattern=r"\A(auto|cpu|cuda(:\d{1,2})?)\Z", description='"auto", "cpu", "cuda" or "cuda:<index>"'),
]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a deployment decides about one runtime; every field has a default that suits one process.

    A field that is not given has its default, whatever the environment says: `Settings.load` reads that.

    Where it runs:
        device: "auto", "cpu", "cuda" or "cuda:<index>".
        cluster: None runs in this process; "auto" or an address joins that Ray cluster, "local" starts one.
        cluster_devices: how many devices to take there; None takes every GPU, or one CPU a node without GPUs.
        cluster_devices_per_gpu: how many devices share one GPU there.
        policy: path of the policy file; None has no file.
        state_dir: folder in which quarantined kernels are remembered; None forgets them with the process.
        perfdb: file of this machine's measurements; "auto" is one in `state_dir` or the user's cache.
        freeze_gc: collect garbage when `start` opens the runtime; what lives then, or is loaded or captured
            later, is left out afterwards.
    What it may do:
        strict: refuse implicit layout, dtype and contiguity transforms and unknown names in policy files.
        capabilities: file that takes away from what kernels claim to take; it cannot add to it.
        plugins: backends and ops of other distributions that may run, by entry point name; others are listed,
            never imported. `old=acme@/PY` takes `acme` from that environment, in a process of it, as `old`.
        isolate: backends that run in processes of their own, as globs over kernel ids and backends: "process"
            has this interpreter, a path is another environment's. In a variable `flashinfer=process,hub=/PY`.
        isolate_timeout_s: seconds after which a call of such a backend counts as hung; its process ends.
        inference: True runs every op under `torch.inference_mode`, False never does, None follows the caller.
        determinism: "strict" admits only kernels whose rows do not depend on the batch they run in.
        graph_strict: True admits under CUDA graph capture only kernels that were proved safe on this machine,
            False also those that declare it and were not found unsafe.
    How it chooses:
        tie_band: relative difference in cost below which a fixed order decides.
        default_gain: relative gain a kernel needs over the library's default to replace it; where both were
            timed at the very size, `tie_band` does if that is less.
        warm: import and compile better kernels in the "background", before start returns ("eager"), or never.
        compile_processes: processes that compile side by side; 0: this one; None: as cores and memory allow.
        payback_calls: calls within which a kernel has to repay its module's compilation; None: for any gain.
        max_keys: distinct keys remembered for each op, those used last; 0 chooses anew for every call.
        plan_ttl_s: seconds after which what is remembered is chosen anew; None remembers it until it changes.
        shared_choices_s: seconds for which choices serve this user's other processes; None: 60 in a cluster.
        dispatch_table: file of decisions that `solve` made ahead; None chooses everything at run time.
        next_dispatch_table: file of its next version, with calls that it missed, measured in idle time.
        shipped_tables: price with the tables that come with the package, on hardware of their class.
        perfdb_days: days after which a measurement of this machine no longer counts; None keeps counting it.
    How it batches:
        batching: "all" ops with a batching rule, only "rows" (norms, linear, rope, functions
            given to `lz.batched`), or "off"; a call's own `batching=` goes before it.
        inline_limit_us: work expected to be shorter runs on the caller's thread (microseconds).
        max_inline_us: inline work after which the next await suspends (microseconds).
        max_batch_size, max_num_batched_tokens, max_batch_bytes: the most one batch holds.
        max_queue_size, max_queue_bytes: the most a batcher queues.
        queue_full_policy: at that limit callers "wait", or the call is "reject"ed with `OverloadedError`.
        completion: a CUDA batch's callers continue at its launch ("stream") or its end ("host", two at most).
        priority_aging_ms: waiting time that lifts a call by one priority class (milliseconds).
    How it stays healthy:
        check_rate: share of calls that are run again on the reference, away from the caller; 0 checks none.
        drift_rate: share of calls that are timed and held against the measurement they were chosen by.
        output_check_s: seconds after which outputs are compared again, 0 never; None is 10 with `plugins`.
        memory_headroom: share of a device's memory that kernels' workspaces leave free.
        workspace_limit_bytes: the most that one kernel's workspace may take; None leaves it to free memory.
        failures_to_open: failures of one kernel within `window_s` that take it out of service.
        window_s: seconds over which failures count.
        cooldown_s: seconds out of service before probes; doubles at each failed round.
        cooldown_max_s: limit of that doubling; a longer cooldown_s raises it.
        probes: calls let through at once while a kernel is on probation.
        probe_timeout_s: seconds after which a probe that was never settled gives its place back.
        hang_s: seconds after which a kernel that runs on a device of a cluster counts as hung.
        max_restarts: crashes of a cluster's device within five minutes after which it stays down.
        placement_timeout_s: seconds to wait for a place in the cluster, and for a device that restarts.
    What it tells:
        kernel_times: count calls and time by kernel; a remembered call then reads the clock twice.
        spans: tell OpenTelemetry's tracer of batches, choices and fallbacks; needs opentelemetry-api.
        call_spans: tell it also of each caller's waiting and each kernel's run, in a sampled trace.
        timeline: file for a Chrome trace; `{pid}` and `{rank}` are this process's numbers. None: no trace.
        nvtx: a timeline also marks batches and kernels as NVTX ranges, where CUDA is there.
    version: format of the file these settings came from.

    Raises: ConfigurationError: a value is outside its range; the message names the field.

    Example:
        >>> import layerzero as lz
        >>> lz.Settings(device="cpu", max_batch_size=64).replace(probes=2).probes
        2
    """

    version: int = FORMAT_VERSION
    device: DeviceName = "auto"
    cluster: Text | None = None
    cluster_devices: int | None = None
    cluster_devices_per_gpu: Count = 1
    policy: Text | None = None
    state_dir: Text | None = None
    perfdb: Text | None = "auto"
    freeze_gc: bool = False
    strict: bool = False
    capabilities: Text | None = None
    plugins: tuple[PluginName, ...] = ()
    isolate: dict[Pattern, Isolated] = {}
    isolate_timeout_s: AboveZero = 30.0
    inference: bool | None = None
    determinism: Literal["default", "strict"] = "default"
    graph_strict: bool = False
    tie_band: NotNegative = 0.03
    default_gain: NotNegative = 0.05
    warm: Literal["background", "eager", "off"] = "background"
    compile_processes: Whole | None = None
    payback_calls: Count | None = 10_000_000
    max_keys: Whole = 4096
    plan_ttl_s: AboveZero | None = None
    shared_choices_s: NotNegative | None = None
    dispatch_table: Text | None = None
    next_dispatch_table: Text | None = None
    shipped_tables: bool = True
    perfdb_days: Days | None = None
    batching: Literal["all", "rows", "off"] = "all"
    inline_limit_us: NotNegative = 200.0
    max_inline_us: NotNegative = 500.0
    max_batch_size: Count = 256
    max_num_batched_tokens: Count = 65_536
    max_batch_bytes: Count = 1 << 30
    max_queue_size: Count = 16_384
    max_queue_bytes: Count = 4 << 30
    queue_full_policy: Literal["wait", "reject"] = "wait"
    completion: Literal["stream", "host"] = "stream"
    priority_aging_ms: NotNegative = 50.0
    check_rate: Share = 0.0
    drift_rate: Share = 0.0
    output_check_s: NotNegative | None = None
    memory_headroom: Share = 0.05
    workspace_limit_bytes: Count | None = None
    failures_to_open: Count = 3
    window_s: AboveZero = 60.0
    cooldown_s: AboveZero = 30.0
    cooldown_max_s: AboveZero = 960.0
    probes: Count = 1
    probe_timeout_s: AboveZero = 60.0
    hang_s: AboveZero = 30.0
    max_restarts: Whole = 5
    placement_timeout_s: AboveZero = 60.0
    kernel_times: bool = False
    spans: bool = False
    call_spans: bool = False
    timeline: Text | None = None
    nvtx: bool = False

    def __post_init__(self) -> None:
        names: object = self.plugins
        if isinstance(names, list):
            msgspec.structs.force_setattr(self, "plugins", tuple(names))
        _check(self)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        **overrides: Any,
    ) -> Settings:
        """Merge `overrides` over `LAYERZERO_<FIELD>` variables over the YAML file over the defaults.

        `path` falls back to `LAYERZERO_CONFIG`; without either no file is read. A file of another format
        version is skipped with a logged event, or refused where `strict` is set.

        Raises: ConfigurationError: an unknown name (with near matches), a value that does not parse, an
            unreadable file; the message names the argument, the variable, or the file and line.
        """
        variables = _own_environment() if env is None else env
        chosen = path if path is not None else variables.get(PREFIX + "CONFIG") or None
        _refuse_unknown(overrides, "setting")
        from_env = _from_environment(variables)
        strict = overrides.get("strict", from_env.get("strict", False)) is True
        from_file: dict[str, Any] = {}
        if chosen is not None:
            try:
                from_file = _from_file(Path(chosen), strict)
            except ConfigurationError as error:
                if path is not None:
                    raise
                named = {**error.context, "variable": f"{PREFIX}CONFIG"}
                raise ConfigurationError(f"{PREFIX}CONFIG: {error}", **named) from error
        return _build({**from_file, **from_env, **overrides})

    def overridden(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """The variables of fields that hold another value here, each with the field's name."""
        variables = _own_environment() if env is None else env
        overrides: dict[str, str] = {}
        for field in FIELDS:
            text = variables.get(variable := PREFIX + field.upper())
            if field != "version" and text is not None and not self._holds(field, text, variable):
                overrides[variable] = field
        return overrides

    def _holds(self, field: str, text: str, variable: str) -> bool:
        try:
            return bool(getattr(self, field) == _parsed(field, text, variable))
        except ConfigurationError:
            return False  # it says nothing that a field could hold

    def replace(self, **changes: Any) -> Settings:
        """A copy with `changes`, checked like a new one."""
        _refuse_unknown(changes, "setting")
        return _build({**msgspec.structs.asdict(self), **changes})


FIELDS: tuple[str, ...] = Settings.__struct_fields__
_HINTS: Mapping[str, Any] = get_type_hints(Settings, include_extras=True)
_NOT_HELD = (msgspec.ValidationError, UnicodeEncodeError)  # the second, of bytes that are no text


def _check(settings: Settings) -> None:
    """Raise for the first field whose value its type does not hold: msgspec checks what it converts alone."""
    if settings.version != FORMAT_VERSION:
        raise ConfigurationError(f"version needs {FORMAT_VERSION}, got {settings.version!r}")
    for (name, hint), default in zip(_HINTS.items(), Settings.__struct_defaults__, strict=True):
        value = getattr(settings, name)
        if value is default or value == {}:  # an empty mapping is made anew for each
            continue
        try:
            msgspec.convert(value, hint)
        except _NOT_HELD as error:
            message = f"{name} needs {_needs(name)}, got {quote(value)}"
            raise ConfigurationError(message, field=name) from error


def _build(values: Mapping[str, Any]) -> Settings:
    if not values:
        return Settings()  # a first call would wait for the annotations of every field
    plain = {name: os.fspath(v) if isinstance(v, os.PathLike) else v for name, v in values.items()}
    try:
        return msgspec.convert(plain, Settings)
    except _NOT_HELD as error:
        if isinstance(error.__cause__, ConfigurationError):
            raise error.__cause__ from None
        name = path_in(str(error)) or tuple(n for n, v in plain.items() if v == getattr(error, "object", ""))
        field = str(name[0]) if name else "settings"
        got = quote(plain.get(field))
        raise ConfigurationError(f"{field} needs {_needs(field)}, got {got}", field=field) from error


def _refuse_unknown(values: Mapping[str, Any], what: str) -> None:
    for name in values:
        if name not in FIELDS:
            message = f"unknown {what} {quote(name)}: {suggestion(str(name), FIELDS)}"
            raise ConfigurationError(message, field=str(name))


def _from_environment(variables: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    fields = {PREFIX + field.upper(): field for field in FIELDS if field != "version"}
    for variable in sorted(name for name in variables if name.startswith(PREFIX)):
        if variable in OTHER_VARIABLES:
            continue
        field = fields.get(variable)
        if field is not None:
            values[field] = _parsed(field, variables[variable], variable)
            _check_alone(field, values[field], f"{variable}: ", variable=variable)
            continue
        hint = suggestion(variable[len(PREFIX) :], [n[len(PREFIX) :] for n in (*fields, *OTHER_VARIABLES)])
        if hint.startswith("did you mean"):
            message = f"unknown environment variable {variable}: after {PREFIX}, {hint}"
            raise ConfigurationError(message, variable=variable)
        log.warning(SETTING_IGNORED, variable=variable)
    return values


def _own_environment() -> Mapping[str, str]:
    """The process's environment, or nothing where the process runs with another user's rights."""
    if hasattr(os, "geteuid") and os.geteuid() != os.getuid():
        return {}
    return os.environ


def _check_alone(field: str, value: Any, where: str, **context: Any) -> None:
    """Check one value apart from the others, so that the error names where it came from."""
    try:
        _build({field: value})
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}{error}", field=field, **context) from error


def _parsed(field: str, text: str, variable: str) -> Any:
    """The value that a variable's text stands for.

    Raises: ConfigurationError: it is none that the field's type has.
    """
    hint, word = _HINTS[field], text.strip()
    optional = type(None) in get_args(hint)
    value: Any = word
    if get_origin(hint) is tuple:
        value = [name.strip() for name in word.split(",") if name.strip()]
    elif get_origin(hint) is dict:
        value = {k.strip(): v.strip() for k, _, v in (i.partition("=") for i in word.split(",")) if k.strip()}
    elif optional and word.lower() in ("", "none"):
        value = None
    elif bool in (hint, *get_args(hint)):
        value = _BOOLEANS.get(word.lower(), word)
    try:
        return msgspec.convert(value, hint, strict=False)
    except _NOT_HELD as error:
        message = f"{variable} needs {_needs(field)}, got {quote(text)}"
        raise ConfigurationError(message, variable=variable, field=field) from error


_BOOLEANS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def _needs(field: str) -> str:
    """What a field's type holds, in words."""
    hint = _HINTS.get(field)
    if hint is None:
        return "a known name"
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return " or ".join(_words(option) for option in options)


def _words(option: Any) -> str:
    if get_origin(option) is Literal:
        return " or ".join(repr(word) for word in get_args(option))
    if get_origin(option) is Annotated:
        return str(get_args(option)[1].description)
    return {
        tuple: "a list of names of installed entry points",
        dict: 'globs over kernel ids, each with "process" or the absolute path of a Python interpreter',
        bool: "true or false", int: "a whole number", type(None): "none",
    }[get_origin(option) or option]  # fmt: skip


def _from_file(path: Path, strict: bool) -> dict[str, Any]:
    file = UserFile(path)
    values = file.value
    version = values.get("version", FORMAT_VERSION)
    if isinstance(version, bool) or not isinstance(version, int):
        raise file.error(("version",), f"version needs a whole number, got {version!r}", field="version")
    if version != FORMAT_VERSION:
        if strict or values.get("strict") is True:
            raise file.error(("version",), f"version needs {FORMAT_VERSION}, got {version}", field="version")
        log.warning(SETTINGS_SKIPPED, path=str(path), version=version, needs=FORMAT_VERSION)
        return {}
    file.refuse_unknown(values, FIELDS, "setting")
    for name, value in values.items():
        line = file.line_of(name)
        _check_alone(name, value, f"{path}:{line}: ", path=str(path), line=line)
    return values
