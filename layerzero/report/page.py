"""One self-contained HTML page of a record: style, script and data inside, nothing fetched from anywhere.

The record is JSON without "<", ">" or "&", so that no text of it can end its element; the script
puts it on the page as text. The page's own policy (CSP) lets nothing run but that script.
"""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path
from typing import Any, Final

import msgspec

from layerzero._util.files import put_whole
from layerzero.report.collect import as_plain
from layerzero.report.compare import ReportComparison
from layerzero.report.document import ReportDocument
from layerzero.spec.errors import ConfigurationError

COMPARISON_KIND: Final = "layerzero comparison"
_FOLDER: Final = Path(__file__).resolve().parent
_UNSAFE: Final = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_HEAD: Final = 1 << 12
_MARKS: Final = ("STYLE_HASH", "SCRIPT_HASH", "STYLE_TEXT", "RECORD_TEXT", "SCRIPT_TEXT")


def page_of_report(document: ReportDocument) -> bytes:
    """The page of a report."""
    return page_of(msgspec.to_builtins(document))


def page_of_comparison(comparison: ReportComparison) -> bytes:
    """The page of two reports compared."""
    title = f"{comparison.second} against {comparison.first}"
    return page_of({"kind": COMPARISON_KIND, "title": title, "comparison": as_plain(comparison)})


def page_of(record: dict[str, Any]) -> bytes:
    """The page that shows `record`; its `kind` says how."""
    template, style, script = (
        _FOLDER.joinpath(f"page.{end}").read_text("utf-8") for end in ("html", "css", "js")
    )
    texts = {
        "STYLE_HASH": _hash_of(style),
        "SCRIPT_HASH": _hash_of(script),
        "STYLE_TEXT": style,
        "SCRIPT_TEXT": script,
        "RECORD_TEXT": safe_json(record),
    }
    # Each mark is replaced where the template has it, not where a text happens to say it.
    pieces, rest = [], template
    for mark in _MARKS:
        before, _, rest = rest.partition(mark)
        pieces += [before, texts[mark]]
    return "".join([*pieces, rest]).encode()


def safe_json(record: Any) -> str:
    """JSON for the inside of an element of HTML."""
    text = msgspec.json.encode(record).decode()
    for character, escaped in _UNSAFE.items():
        text = text.replace(character, escaped)
    return text


def _hash_of(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def write_page(path: str | os.PathLike[str], page: bytes) -> None:
    """Write a page, whole or not at all.

    Raises: ConfigurationError: another file than a page or an empty one is there. OSError: it cannot be
        written.
    """
    target = Path(path)
    if target.exists() and not _is_page(target):
        raise ConfigurationError(f"{path}: not replaced, it is no page of lz", path=str(path))
    put_whole(target, page)


def _is_page(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(_HEAD)
    return not head or b"<title>LayerZero report</title>" in head
