"""Capabilities in files: what every kernel claims, exported and checked; and overlays, which may only narrow.

The truth is in Python beside each backend. `export` writes it as `capabilities.json`, with a hash of the
content. An overlay is a file of the same shape, JSON or YAML, that names some kernels and some of their
fields: a deployment takes away what it does not trust, without code. What would widen a kernel is refused,
because no test has run it there; so is everything that is not understood.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import torch

from layerzero._util import log
from layerzero._util.files import replace_own
from layerzero._util.strict_yaml import quote, suggestion
from layerzero.spec.capability import (
    ACTIVATIONS,
    ALL_PLATFORMS,
    FEATURE_REASONS,
    Capability,
    changed_error,
    fill_later_fields,
    respell,
)
from layerzero.spec.condition import parse_limit
from layerzero.spec.errors import ConfigurationError, PolicyValidationError
from layerzero.spec.kernel import Kernel, version
from layerzero.spec.tolerances import FACTOR
from layerzero.spec.user_file import UserFile

FORMAT = 2
MIGRATED = "capabilities.migrated"
PLATFORMS = ALL_PLATFORMS | {"hpu", "mps"}
FIELDS: tuple[str, ...] = Capability.__struct_fields__
# What a limit may bound: the axes of `layerzero.spec.call_spec`, and those of single ops beside them.
AXES = frozenset({
    "B", "C", "D", "Dv", "E", "F", "G", "H", "Hk", "Hq", "K", "L", "N", "P", "R", "S", "Sk", "Sq", "T", "V",
})  # fmt: skip
ADVICE = (
    "an overlay may only narrow; for more, register a kernel of your own id with the wider capability "
    "(runtime.add_kernel) and run the contract tests on it"
)


class CapabilityEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel of a document: `error_factor` is how often plain torch's own error it may err."""

    op: str
    backend: str
    error_factor: float
    capability: Capability


class Capabilities(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole document; `content` is the hash of `kernels`."""

    version: int
    content: str
    kernels: dict[str, CapabilityEntry]


def export(kernels: Iterable[Kernel]) -> Capabilities:
    """The document of some kernels, by id."""
    entries = {
        k.id: CapabilityEntry(op=k.op, backend=k.backend, error_factor=FACTOR, capability=k.capability)
        for k in sorted(kernels, key=lambda k: k.id)
    }
    return Capabilities(version=FORMAT, content=content_hash(entries), kernels=entries)


def content_hash(entries: Mapping[str, CapabilityEntry]) -> str:
    """Equal for equal entries, in every process."""
    return _plain_hash(msgspec.to_builtins(entries, order="sorted"))


def _plain_hash(entries: Mapping[str, Any]) -> str:
    return hashlib.sha256(msgspec.json.encode(entries, order="sorted")).hexdigest()


def write(path: str | os.PathLike[str], document: Capabilities) -> None:
    """Write a document, whole or not at all, so that a diff reads well.

    Raises: FileExistsError: `path` is another kind of file.
    """
    plain = msgspec.to_builtins(document, order="sorted")
    data = msgspec.json.format(msgspec.json.encode(plain, order="sorted"), indent=1) + b"\n"
    replace_own(Path(path), data, "kernels")


def read(path: str | os.PathLike[str]) -> Capabilities:
    """A document out of its file, checked: every field there, every limit one that can be judged.

    Raises: ConfigurationError: unknown version, a missing or unknown field, a constraint that means nothing;
        kernel and field are named. CacheCorruptionError: the content does not match its hash.
    """
    file = _CapabilityFile(path)
    for name in ("version", "content", "kernels"):
        if name not in file.value:
            raise ConfigurationError(f"{path}: needs {name}, got none", path=str(path), field=name)
    content = None if file.migrated else file.value["content"]
    file.migrated |= fill_later_fields(path, file.kernels(), content, _plain_hash)
    for kernel, entry in file.kernels().items():
        missing = [n for n in CapabilityEntry.__struct_fields__ if n not in entry]
        missing += [n for n in FIELDS if n not in entry["capability"]]
        if missing:
            raise file.error_of(kernel, f"needs {', '.join(missing)}, got none of it")
    try:
        document = msgspec.convert(file.value, Capabilities)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{path}: {error}", path=str(path)) from error
    for kernel, stored_entry in document.kernels.items():
        wrong, factor = problems(stored_entry.capability), stored_entry.error_factor
        if not 0 < factor <= FACTOR:
            wrong.append(f"error_factor needs more than 0 and at most {FACTOR}, got {factor}")
        if wrong:
            raise file.error_of(kernel, wrong[0])
    if file.migrated:
        return msgspec.structs.replace(document, content=content_hash(document.kernels))
    if content_hash(document.kernels) != document.content:
        raise changed_error(path)
    return document


def problems(capability: Capability) -> list[str]:
    """What makes a capability meaningless, one sentence each; empty where it can be judged."""
    wrong: list[str] = []
    for name, is_known in _KNOWN.items():
        values: frozenset[str] = getattr(capability, name) or frozenset()
        if strange := sorted(str(v) for v in values if not is_known(str(v))):
            wrong.append(f"{name} needs names that are known, got {quote(strange[0])}")
    for name in ("platforms", "dtypes"):
        if not getattr(capability, name):
            wrong.append(f"{name} needs at least one")
    for name in ("torch_min", "torch_below", "cuda_min", "driver_min"):
        text = getattr(capability, name)
        if text is not None and not version(text):
            wrong.append(f"{name} needs a version, got {quote(text)}")
    low, high = capability.sm_min, capability.sm_max
    if any(sm is not None and not 50 <= sm <= 999 for sm in (low, high)):
        wrong.append(f"sm_min and sm_max need 50 to 999, got {low} and {high}")
    if low is not None and high is not None and low > high:
        wrong.append(f"sm_max needs at least sm_min, got {low} and {high}")
    if not 1 <= capability.alignment <= 4096 or capability.alignment & (capability.alignment - 1):
        wrong.append(f"alignment needs a power of two up to 4096, got {capability.alignment}")
    if not capability.source.strip():
        wrong.append("source needs words")
    return wrong + [why for text in capability.limits if (why := _meaningless(text))]


def _meaningless(text: str) -> str:
    """Why a limit bounds nothing; an axis that no op has would let every call pass."""
    try:
        axes = set(parse_limit(text).condition.axes)
    except ConfigurationError as error:
        return str(error)
    if axes <= AXES:
        return ""
    return f"limits need axes out of {', '.join(sorted(AXES))}, got {quote(', '.join(sorted(axes)))}"


_KNOWN: Mapping[str, Callable[[str], bool]] = {
    "platforms": PLATFORMS.__contains__,
    "dtypes": lambda name: isinstance(getattr(torch, name, None), torch.dtype),
    "index_dtypes": lambda name: name in ("int32", "int64"),
    "only_with": FEATURE_REASONS.__contains__,
    "features": lambda name: name in FEATURE_REASONS or name.removeprefix("act_") in ACTIVATIONS,
}


class Overlay(msgspec.Struct, frozen=True, kw_only=True):
    """What a deployment takes away: by kernel, the fields that its file gives; `path` names the file."""

    path: str = ""
    digest: str = ""
    changes: dict[str, dict[str, Any]] = {}

    def apply(self, kernel: Kernel) -> Kernel:
        """`kernel` as narrowed here; the same object where nothing is said of it.

        Raises: ConfigurationError: a change would widen it.
        """
        changes = self.changes.get(kernel.id)
        if not changes:
            return kernel
        narrowed = narrow(kernel.id, kernel.capability, changes, self.path)
        return dataclasses.replace(kernel, capability=narrowed)


def load_overlay(path: str | os.PathLike[str], kernels: Sequence[Kernel]) -> Overlay:
    """The overlay of a file, tried on every kernel that it names.

    Raises: ConfigurationError: the file, the kernel and the field are named; nothing of it holds then.
    """
    file = _CapabilityFile(path)
    strange = sorted(set(file.value) - set(Capabilities.__struct_fields__))
    if strange:
        raise ConfigurationError(f"{path}: {strange[0]!r} is no part of an overlay", path=str(path))
    by_id = {kernel.id: kernel for kernel in kernels}
    changes: dict[str, dict[str, Any]] = {}
    for name, entry in file.kernels().items():
        kernel = by_id.get(name)
        if kernel is None:
            raise file.error_of(name, f"no kernel has this id: {suggestion(name, by_id)}")
        for field, kernel_value in (("op", kernel.op), ("backend", kernel.backend), ("error_factor", FACTOR)):
            if field in entry and entry[field] != kernel_value:
                raise file.error_of(name, f"{field} needs {kernel_value}, got {quote(entry[field])}")
        if unknown := sorted(set(entry) - set(CapabilityEntry.__struct_fields__)):
            raise file.error_of(name, f"{unknown[0]!r} is no part of a kernel's entry")
        changes[name] = file.fields_of(name, entry["capability"])
    digest = hashlib.sha256(msgspec.json.encode(msgspec.to_builtins(changes, order="sorted"), order="sorted"))
    overlay = Overlay(path=str(path), digest=digest.hexdigest(), changes=changes)
    for name in changes:
        try:
            overlay.apply(by_id[name])
        except ConfigurationError as error:
            raise file.error_of(name, str(error)) from None
    return overlay


def narrow(kernel_id: str, capability: Capability, changes: Mapping[str, Any], where: str) -> Capability:
    """`capability` with what `changes` take away.

    Raises: ConfigurationError: a change would widen it, or leaves nothing that could be judged.
    """
    narrower: dict[str, Any] = {}
    for name, value in changes.items():
        before = getattr(capability, name)
        if name == "source" or value == before:
            continue
        if name == "limits":
            weaker = next((new for new in value for old in before if _weaker(new, old)), None)
            dropped = set(FIELDS) <= set(changes) and not set(before) <= set(value)
            if weaker is not None or dropped:
                raise _widening(kernel_id, name, "every limit that holds", weaker or value)
            narrower[name] = (*before, *(limit for limit in value if limit not in before))
        elif not _NARROWER[name][1](value, before):
            raise _widening(kernel_id, name, f"{_NARROWER[name][0]} {_text(before)}", value)
        else:
            narrower[name] = value
    if not narrower:
        return capability
    source = f"{capability.source}; narrowed by {where}"
    narrowed = msgspec.structs.replace(capability, **narrower, source=source, narrowed=frozenset(narrower))
    if wrong := problems(narrowed):
        raise ConfigurationError(f"{kernel_id}: {wrong[0]}", field=next(iter(narrower)))
    return narrowed


def _widening(kernel_id: str, name: str, needs: str, got: object) -> ConfigurationError:
    return ConfigurationError(f"{kernel_id}: {name} needs {needs}, got {_text(got)}: {ADVICE}", field=name)


def _text(value: object) -> str:
    if isinstance(value, frozenset | set | tuple | list):
        return ", ".join(sorted(map(str, value)))[:200] or "none"
    return str(value)


def _bound(holds: Callable[[Any, Any], bool], new: Any, old: Any) -> bool:
    numbers = [version(value) if isinstance(value, str) else value for value in (new, old)]
    return new is not None and (old is None or holds(*numbers))


# Which values of a field are narrower than those before, and what an error says that it needs.
_NARROWER_THAN: tuple[tuple[str, str, Callable[[Any, Any], bool]], ...] = (
    ("platforms dtypes index_dtypes features", "some of", lambda new, old: new <= old),
    # where nothing listed means that everything is taken
    ("layouts mma_families cpu_vendors archs only_with", "some of",
     lambda new, old: bool(new) and (not old or new <= old)),
    ("isa half_isa", "all of", lambda new, old: new >= old),
    ("sm_min alignment torch_min cuda_min driver_min", "at least", partial(_bound, operator.ge)),
    ("sm_max torch_below", "at most", partial(_bound, operator.le)),
    ("contiguous last_stride1", "less than", lambda new, old: new or not old),  # requirements
    ("mixed_dtypes gradient deterministic batch_invariant graph_safe autocast tp_invariant", "less than",
     lambda new, old: old or not new),  # promises
    ("narrowed", "less than", lambda new, old: False),
)  # fmt: skip
_NARROWER = {name: (words, rule) for names, words, rule in _NARROWER_THAN for name in names.split()}


def _weaker(new: str, old: str) -> bool:
    """Whether `new` reads like `old` with a wider bound: it would change nothing, and was meant to."""
    new_limit, old_limit = parse_limit(new), parse_limit(old)
    after, before = new_limit.condition, old_limit.condition
    is_wider = _WIDER.get(before.operator)
    alike = (after.field, after.operator, new_limit.when) == (before.field, before.operator, old_limit.when)
    comparable = type(after.value) is type(before.value) and not isinstance(after.value, str)
    return bool(alike and comparable and is_wider and is_wider(after.value, before.value))


_WIDER: Mapping[str, Callable[[Any, Any], bool]] = {
    "in": lambda new, old: not set(new) <= set(old),
    "not in": lambda new, old: not set(new) >= set(old),
    "%": lambda new, old: new % old != 0,
    **dict.fromkeys((">", ">="), lambda new, old: new < old),
    **dict.fromkeys(("<", "<="), lambda new, old: new > old),
}


# -- reading --------------------------------------------------------------------------------------------


class _CapabilityFile(UserFile):
    """A document or an overlay, of the version that is read here."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        version = self.value.get("version")
        self.migrated = version == 1 and not isinstance(version, bool)
        if self.migrated:
            self._migrate()
            version = FORMAT
        if isinstance(version, bool) or version != FORMAT:
            raise ConfigurationError(
                f"{self.path}: version needs {FORMAT}, got {quote(version)}", path=self.path
            )

    def _migrate(self) -> None:
        """Spell the limits of format 1, which were records, as conditions; its hash is checked before."""
        kernels = self.kernels()
        if "content" in self.value and _plain_hash(kernels) != self.value["content"]:
            raise changed_error(self.path)
        self.value["version"] = FORMAT
        for name, entry in kernels.items():
            try:
                respell(entry["capability"])
            except (KeyError, TypeError, AttributeError) as error:
                raise self.error_of(name, f"limits need limits of format 1, got {error!r}") from error
        log.info(MIGRATED, path=self.path, version=1, now=FORMAT)

    def kernels(self) -> dict[str, dict[str, Any]]:
        kernels = self.value.get("kernels")
        if not isinstance(kernels, dict) or not kernels:
            raise ConfigurationError(
                f"{self.path}: kernels needs a mapping by kernel id, got {quote(kernels)}"
            )
        for name, entry in kernels.items():
            if not isinstance(entry, dict):
                raise self.error_of(name, f"needs a mapping, got {quote(entry)}")
            if not isinstance(entry.get("capability"), dict):
                raise self.error_of(name, f"capability needs a mapping, got {quote(entry.get('capability'))}")
        return kernels

    def fields_of(self, kernel: str, capability: dict[str, Any]) -> dict[str, Any]:
        """An overlay's fields of a kernel, as a capability has them."""
        fields: dict[str, Any] = {}
        for name, value in capability.items():
            if name not in FIELDS:
                raise self.error_of(kernel, f"unknown field {quote(name)}: {suggestion(name, FIELDS)}")
            try:
                fields[name] = msgspec.convert(value, _HINTS[name])
                if name == "limits":  # one spelling, so that equal limits are found equal
                    fields[name] = tuple(str(parse_limit(text)) for text in fields[name])
            except (msgspec.ValidationError, PolicyValidationError) as error:
                raise self.error_of(kernel, f"{name}: {error}") from error
        return fields

    def error_of(self, kernel: str, why: str) -> ConfigurationError:
        why = why if why.startswith(kernel) else f"{kernel}: {why}"
        return self.error(("kernels", kernel), why, kernel=kernel)


_HINTS: dict[str, Any] = get_type_hints(Capability)
