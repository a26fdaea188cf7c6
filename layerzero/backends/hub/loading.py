"""Importing what was checked: signatures, versions and names first, the names it has registered afterwards.

A module of the hub is put into `sys.modules` under the id that it gives itself, and its operators into the
namespace that it names: both must be new, so that two versions run side by side and none takes the place of
a module or an operator that is there.
"""

from __future__ import annotations

import importlib
import re
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from layerzero.backends.hub.refusal import refusal
from layerzero.spec.reasons import Reason

_ID = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_OPS = re.compile(rb"torch\.ops\.([A-Za-z_][A-Za-z0-9_]*)")
_LOADING = threading.Lock()  # what is new after an import is that import's


def load_module(repository: str, copy: Path, version: int | None, *, signed: bool) -> ModuleType:
    """The module of a repository's copy, whose bytes were checked, imported by `kernels` for this system.

    Raises: BackendNotAvailableError: it is unsigned where it has to be, another version than `version`, needs
        repositories that are not locked, takes a name that is taken, or was not built for this system.
    """
    library = importlib.import_module("kernels")
    with _LOADING:
        for metadata in sorted(copy.glob("build/*/metadata.json")):
            if signed:
                _verify(repository, metadata.parent)
            _check(repository, copy, library.Metadata.read_from_file(metadata), version)
            _check_namespaces(repository, copy, metadata.parent)
        before = _operators()
        writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
        try:
            module: ModuleType = library.get_local_kernel(copy)
        except (Exception, SystemExit) as error:  # whatever a stranger's module raises
            why = f"{type(error).__name__}: {error}"[:400]
            raise refusal(repository, why, Reason.BACKEND_PLATFORM_BUILD) from error
        finally:
            sys.dont_write_bytecode = writes
        added = _operators() - before
    _check_added(repository, copy, added, _namespaces(before))
    return module


def _verify(repository: str, variant: Path) -> None:
    """Refuse a variant without a signature of a publisher that `kernels` trusts (sigstore)."""
    try:
        verify = importlib.import_module("kernels.verify")
    except ImportError as error:
        raise refusal(repository, f"signatures need kernels>=0.17 with sigstore: {error}") from error
    try:
        result = verify.verify_variant(variant)
    except Exception as error:  # of the network, where the roots of trust cannot be fetched
        raise refusal(
            repository, f"its signature cannot be checked: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(result, verify.VerificationResult.Success):
        why = str(getattr(result, "reason", "") or getattr(result, "violations", ""))
        raise refusal(repository, f"its signature does not hold: {type(result).__name__} {why}"[:400])


def _check(repository: str, copy: Path, metadata: Any, version: int | None) -> None:
    if version is not None and metadata.version != version:
        raise refusal(
            repository,
            f"it says it is version {metadata.version}, and version {version} is locked",
            Reason.BACKEND_VERSION_MISMATCH,
        )
    if metadata.kernel_depends:
        needs = ", ".join(dependency.repo_id for dependency in metadata.kernel_depends)
        raise refusal(repository, f"it would download {needs}, which its lock does not name")
    name = metadata.id
    if not _ID.fullmatch(name):
        raise refusal(repository, f"its id needs to be a name, got {name!r}")
    loaded = sys.modules.get(name)
    if loaded is not None and not _is_of(loaded, copy):
        raise refusal(repository, f"its id {name!r} is the name of a module that is loaded")


def _is_of(module: ModuleType, copy: Path) -> bool:
    return Path(getattr(module, "__file__", None) or "/").is_relative_to(copy)


def _check_namespaces(repository: str, copy: Path, variant: Path) -> None:
    """Refuse operators of its own under a namespace that is there, where its file `_ops.py` says so."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    if any(_is_of(module, copy) for module in modules):
        return  # it is loaded already
    registered = _namespaces(_operators())
    for file in variant.rglob("_ops.py"):
        for name in sorted({match.decode() for match in _OPS.findall(file.read_bytes())} & registered):
            raise refusal(repository, f"its operators' namespace torch.ops.{name} is taken")


def _check_added(repository: str, copy: Path, added: frozenset[str], before: frozenset[str]) -> None:
    """Refuse a repository whose operators went into a namespace that was there; others may load meanwhile."""
    suspects = sorted(operator for operator in added if operator.partition("::")[0] in before)
    if not suspects:
        return
    content = b"\0".join(file.read_bytes() for file in copy.rglob("*") if file.is_file())
    for operator in suspects:
        namespace, _, name = operator.partition("::")
        if namespace.encode() in content and name.partition(".")[0].encode() in content:
            raise refusal(repository, f"it registers {operator} in a namespace that was there before")


def _operators() -> frozenset[str]:
    return frozenset(torch._C._dispatch_get_all_op_names())


def _namespaces(operators: frozenset[str]) -> frozenset[str]:
    return frozenset(operator.partition("::")[0] for operator in operators)
