"""A file of ours, checked by the reader of its kind: tables, policies, capabilities, manifests, reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from layerzero._util.files import decode_json, read_given
from layerzero.gates.baseline import FORMAT, Baseline
from layerzero.perfdb.shipped import read_table
from layerzero.perfdb.table_file import read_table_file
from layerzero.report.document import read_report
from layerzero.selection.dispatch_table import DispatchTable
from layerzero.selection.policy.load import load_policy
from layerzero.spec import capability_overlays
from layerzero.spec.errors import LayerZeroError
from layerzero.warmup.manifest import manifest_of

# The field that tells a kind of JSON file, in this order, what it is called, and its reader.
_KINDS: Final[Mapping[str, tuple[str, Callable[[Path], Any]]]] = {
    "rows": ("table of measurements", read_table),
    "buckets": ("dispatch table", DispatchTable.load),
    "paced": ("baseline", lambda path: read_table_file(path, Baseline, "paced", {}, format=FORMAT)),
    "maps": ("report", read_report),
    "kernels": ("capabilities", capability_overlays.read),
    "calls": ("manifest", manifest_of),
}


def check_file(path: Path) -> tuple[str, str]:
    """What kind of file it is, and what is wrong with it; empty where it holds."""
    if path.suffix in (".yaml", ".yml"):
        return "policy", _problem(load_policy, path)
    if path.suffix == ".html":
        return "report", _problem(read_report, path)
    try:
        names = decode_json(read_given(path), dict[str, msgspec.Raw])
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        return "unknown", f"{type(error).__name__}: {error}"[:300]
    for field, (kind, read) in _KINDS.items():
        if field in names:
            return kind, _problem(read, path)
    return "unknown", f"it has none of the fields {', '.join(_KINDS)}"


def _problem(read: Callable[[Path], Any], path: Path) -> str:
    try:
        read(path)
    except (LayerZeroError, OSError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"[:500]
    return ""
