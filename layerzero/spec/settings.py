"""Settings of one runtime: an immutable record from program, environment, file and defaults.

`Settings(...)` is what the program writes and reads nothing else. `Settings.load(...)` reads the environment
and the file as well; so do `lz.start()` without settings and the `lz` command, which call it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from layerzero._util import log
from layerzero._util.strict_yaml import Document, YamlError, parse_file, path_in, quote, suggestion
from layerzero.spec.errors import ConfigurationError

FORMAT_VERSION = 1
PREFIX = "LAYERZERO_"
# Read by other modules under the same prefix; a variable outside this list and the fields is not ours.
OTHER_VARIABLES = frozenset(
    PREFIX + word for word in ("CONFIG", "LOCK", "DENY", "ALLOW", "PREFER", "AVOID", "NATIVE")
)
SETTING_IGNORED = "setting.ignored"
SETTING_OVERRIDDEN = "setting.overridden"
SETTINGS_SKIPPED = "settings.skipped"


BATCHING = ("all", "rows", "off")
# What only opening a runtime reads.
READ_AT_START = (
    "capabilities", "cluster", "cluster_devices", "freeze_gc", "hang_s", "max_restarts",
    "placement_timeout_s", "plugins",
)  # fmt: skip
_NAMES = "a list of names of installed entry points"
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,2})?")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a deployment decides about one runtime; every field has a default that suits one process.

    A field that is not given has its default, whatever the environment says: `Settings.load` reads that.

    Where it runs:
        device: "auto", "cpu", "cuda" or "cuda:<index>".
        cluster: None runs in this process; "auto" or an address joins that Ray cluster, "local" starts one.
        cluster_devices: how many devices to take there; None takes every GPU, or one CPU a node without GPUs.
        policy: path of the policy file; None has no file.
        state_dir: folder in which quarantined kernels are remembered; None forgets them with the process.
        perfdb: file of this machine's measurements; "auto" is one in `state_dir`, else in the user's cache
            folder; None keeps none.
        freeze_gc: collect garbage when `start` opens the runtime, and leave what is alive then out of later
            collections until it closes; a full one walks over all of torch's own objects.
    What it may do:
        strict: refuse implicit layout, dtype and contiguity transforms and unknown names in policy files.
        capabilities: file that takes away from what kernels claim to take; it cannot add to it.
        plugins: backends of other distributions whose kernels may run, by entry point name; those installed
            and not named are listed and never imported. In a variable, separated by commas.
        inference: True runs every op under `torch.inference_mode`, False never does, None follows the caller.
        determinism: "strict" admits only kernels whose rows do not depend on the batch they run in.
        graph_strict: True admits under CUDA graph capture only kernels that were proved safe on this machine,
            False also those that declare it and were not found unsafe.
    How it chooses:
        tie_band: relative difference in cost below which a fixed order decides.
        default_gain: relative gain a kernel needs over the library's default to replace it; where both were
            timed at the very size, `tie_band` does if that is less.
        warm: import and compile better kernels in the "background", before start returns ("eager"), or never.
        max_keys: distinct keys remembered for each op; older ones are chosen anew.
        dispatch_table: file of decisions that `solve` made ahead; None chooses everything at run time.
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
        completion: a CUDA batch's callers go on when it is launched ("stream"), or when it has run ("host"),
            with at most two batches under way.
        priority_aging_ms: waiting time that lifts a call by one priority class (milliseconds).
    How it stays healthy:
        check_rate: share of calls that are run again on the reference, away from the caller; 0 checks none.
        drift_rate: share of calls that are timed and held against the measurement they were chosen by.
        memory_headroom: share of a device's memory that kernels' workspaces leave free.
        workspace_limit_bytes: the most that one kernel's workspace may take; None leaves it to free memory.
        failures_to_open: failures of one kernel within `window_s` that take it out of service.
        window_s: seconds over which failures count.
        cooldown_s: seconds out of service before probes; doubles at each failed round.
        cooldown_max_s: limit of that doubling; a longer cooldown_s raises it.
        probes: calls let through at once while a kernel is on probation.
        probe_timeout_s: seconds after which a probe that was never settled gives its place back.
        hang_s: seconds after which a kernel that runs on a device of a cluster counts as hung.
        max_restarts: deaths of a cluster's device within five minutes after which it stays down.
        placement_timeout_s: seconds to wait for a place in the cluster, and for a device that restarts.
    What it tells:
        spans: tell OpenTelemetry's tracer of ops, batches, choices and fallbacks; needs opentelemetry-api.
    version: format of the file these settings came from.

    Raises: ConfigurationError: a value is outside its range; the message names the field.
    """

    version: int = FORMAT_VERSION
    device: str = "auto"
    cluster: str | None = None
    cluster_devices: int | None = None
    policy: str | None = None
    state_dir: str | None = None
    perfdb: str | None = "auto"
    freeze_gc: bool = False
    strict: bool = False
    capabilities: str | None = None
    plugins: tuple[str, ...] = ()
    inference: bool | None = None
    determinism: Literal["default", "strict"] = "default"
    graph_strict: bool = False
    tie_band: float = 0.03
    default_gain: float = 0.05
    warm: Literal["background", "eager", "off"] = "background"
    max_keys: int = 4096
    dispatch_table: str | None = None
    shipped_tables: bool = True
    perfdb_days: float | None = None
    batching: Literal["all", "rows", "off"] = "all"
    inline_limit_us: float = 200.0
    max_inline_us: float = 500.0
    max_batch_size: int = 256
    max_num_batched_tokens: int = 65_536
    max_batch_bytes: int = 1 << 30
    max_queue_size: int = 16_384
    max_queue_bytes: int = 4 << 30
    queue_full_policy: Literal["wait", "reject"] = "wait"
    completion: Literal["stream", "host"] = "stream"
    priority_aging_ms: float = 50.0
    check_rate: float = 0.0
    drift_rate: float = 0.0
    memory_headroom: float = 0.05
    workspace_limit_bytes: int | None = None
    failures_to_open: int = 3
    window_s: float = 60.0
    cooldown_s: float = 30.0
    cooldown_max_s: float = 960.0
    probes: int = 1
    probe_timeout_s: float = 60.0
    hang_s: float = 30.0
    max_restarts: int = 5
    placement_timeout_s: float = 60.0
    spans: bool = False

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
_HINTS: Mapping[str, Any] = get_type_hints(Settings)

_AT_LEAST_ONE = (
    "max_keys",
    "max_batch_size",
    "max_num_batched_tokens",
    "max_batch_bytes",
    "max_queue_size",
    "max_queue_bytes",
    "failures_to_open",
    "probes",
)
_NOT_NEGATIVE = (
    "max_restarts",
    "inline_limit_us",
    "max_inline_us",
    "priority_aging_ms",
    "tie_band",
    "default_gain",
)
_SHARES = ("check_rate", "drift_rate", "memory_headroom")
_ABOVE_ZERO = ("window_s", "cooldown_s", "cooldown_max_s", "probe_timeout_s", "hang_s", "placement_timeout_s")


def _check(settings: Settings) -> None:
    if settings.version != FORMAT_VERSION:
        raise ConfigurationError(f"version needs {FORMAT_VERSION}, got {settings.version!r}")
    rules: tuple[tuple[tuple[str, ...], str, Callable[[float], bool]], ...] = (
        (_AT_LEAST_ONE, "a whole number of at least 1", lambda n: n >= 1),
        (_NOT_NEGATIVE, "a finite number of at least 0", lambda n: 0 <= n < math.inf),
        (_ABOVE_ZERO, "a finite number above 0", lambda n: 0 < n < math.inf),
        (_SHARES, "a number from 0 to 1", lambda n: 0 <= n <= 1),
    )
    for names, needs, holds in rules:
        for name in names:
            value = getattr(settings, name)
            whole = names is not _AT_LEAST_ONE or isinstance(value, int)
            if isinstance(value, bool) or not isinstance(value, int | float) or not whole or not holds(value):
                raise ConfigurationError(f"{name} needs {needs}, got {quote(value)}", field=name)
    limit = settings.workspace_limit_bytes
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        message = f"workspace_limit_bytes needs a whole number of at least 1, or none, got {quote(limit)}"
        raise ConfigurationError(message, field="workspace_limit_bytes")
    days = settings.perfdb_days
    if days is not None and (
        isinstance(days, bool) or not isinstance(days, int | float) or not 0 < days < 1e5
    ):
        message = f"perfdb_days needs a number above 0, or none, got {quote(days)}"
        raise ConfigurationError(message, field="perfdb_days")
    _check_words(settings)


def _check_words(settings: Settings) -> None:
    for name, hint in _HINTS.items():
        value = getattr(settings, name)
        if get_origin(hint) is Literal and value not in get_args(hint):
            raise ConfigurationError(f"{name} needs {_words(hint)}, got {quote(value)}", field=name)
        if hint is bool and not isinstance(value, bool):
            raise ConfigurationError(f"{name} needs true or false, got {quote(value)}", field=name)
    if settings.inference not in (True, False, None):
        raise ConfigurationError(
            f"inference needs True, False or None, got {quote(settings.inference)}", field="inference"
        )
    for name in ("device", "cluster", "policy", "state_dir", "perfdb", "dispatch_table", "capabilities"):
        value = getattr(settings, name)
        if (value is None and name == "device") or value == "" or not isinstance(value, str | None):
            raise ConfigurationError(f"{name} needs a non-empty string, got {quote(value)}", field=name)
    names = settings.plugins
    if not isinstance(names, tuple) or not all(isinstance(n, str) and n.strip() == n != "" for n in names):
        raise ConfigurationError(f"plugins needs {_NAMES}, got {quote(names)}", field="plugins")
    if not _DEVICE.fullmatch(settings.device):
        needs = '"auto", "cpu", "cuda" or "cuda:<index>"'
        raise ConfigurationError(f"device needs {needs}, got {quote(settings.device)}", field="device")


def _build(values: Mapping[str, Any]) -> Settings:
    if not values:
        return Settings()  # a first call would wait for the annotations of every field
    plain = {name: os.fspath(v) if isinstance(v, os.PathLike) else v for name, v in values.items()}
    try:
        return msgspec.convert(plain, Settings)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigurationError):
            raise error.__cause__ from None
        name = path_in(str(error))
        field = str(name[0]) if name else "settings"
        raise ConfigurationError(
            f"{field} needs {_needs(field)}, got {quote(plain.get(field))}", field=field
        ) from error


def _refuse_unknown(values: Mapping[str, Any], what: str) -> None:
    for name in values:
        if name not in FIELDS:
            raise ConfigurationError(
                f"unknown {what} {quote(name)}: {suggestion(str(name), FIELDS)}", field=str(name)
            )


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
        names = [name.removeprefix(PREFIX) for name in (*fields, *OTHER_VARIABLES)]
        hint = suggestion(variable.removeprefix(PREFIX), names)
        if hint.startswith("did you mean"):
            raise ConfigurationError(
                f"unknown environment variable {variable}: after {PREFIX}, {hint}", variable=variable
            )
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
    hint = _HINTS[field]
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    word = text.strip()
    if get_origin(hint) is tuple:
        return tuple(name.strip() for name in word.split(",") if name.strip())
    if type(None) in options and word.lower() in ("", "none"):
        return None
    for option in options:
        try:
            if option is bool:
                return _boolean(word)
            if option in (int, float):
                return option(word)
        except ValueError as error:
            raise ConfigurationError(
                f"{variable} needs {_needs(field)}, got {quote(text)}", variable=variable, field=field
            ) from error
        if get_origin(option) is Literal and word not in get_args(option):
            raise ConfigurationError(
                f"{variable} needs {_needs(field)}, got {quote(text)}", variable=variable, field=field
            )
    if not word:
        raise ConfigurationError(f"{variable} needs {_needs(field)}, got ''", variable=variable, field=field)
    return word


def _boolean(word: str) -> bool:
    lowered = word.lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError(word)


def _needs(field: str) -> str:
    hint = _HINTS.get(field)
    if hint is None:
        return "a known name"
    if get_origin(hint) is Literal:
        return _words(hint)
    if get_origin(hint) is tuple:
        return _NAMES
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a string",
        type(None): "none",
    }
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return " or ".join(names[option] for option in options)


def _words(hint: Any) -> str:
    return " or ".join(repr(word) for word in get_args(hint))


def _from_file(path: Path, strict: bool) -> dict[str, Any]:
    try:
        document = parse_file(path)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}", path=str(path)) from error
    except YamlError as error:
        where = f"{path}:{error.line}" if error.line else str(path)
        raise ConfigurationError(f"{where}: {error}", path=str(path), line=error.line) from error
    values = document.value
    version = values.get("version", FORMAT_VERSION)
    if isinstance(version, bool) or not isinstance(version, int):
        raise _file_error(path, document, "version", f"version needs a whole number, got {version!r}")
    if version != FORMAT_VERSION:
        if strict or values.get("strict") is True:
            raise _file_error(path, document, "version", f"version needs {FORMAT_VERSION}, got {version}")
        log.warning(SETTINGS_SKIPPED, path=str(path), version=version, needs=FORMAT_VERSION)
        return {}
    for name in values:
        if name not in FIELDS:
            raise _file_error(
                path, document, name, f"unknown setting {quote(name)}: {suggestion(name, FIELDS)}"
            )
    for name, value in values.items():
        line = document.line_of((name,))
        _check_alone(name, value, f"{path}:{line}: ", path=str(path), line=line)
    return values


def _file_error(path: Path, document: Document, field: str, message: str) -> ConfigurationError:
    line = document.line_of((field,))
    return ConfigurationError(f"{path}:{line}: {message}", path=str(path), line=line, field=field)
