"""Read a small YAML file from another party: plain data with line numbers, or a refusal.

Refused: more than 1 MiB, more than 16 levels, anchors and aliases (they can expand without bound), tags (they
choose types), merge keys, duplicate keys, lists or mappings as keys, a second document, and text that is
not UTF-8.
Scalars follow YAML 1.2's core schema: only `true` and `false` are booleans, only decimal numbers are
numbers, so `no`, `on`, `1:30`, `0777` and dates stay the strings that were written.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

MAX_BYTES = 1 << 20
MAX_DEPTH = 16
MAX_SHOWN = 80

Path = tuple[str | int, ...]

_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?(?:\d{1,40}\.\d{0,40}|\.\d{1,40}|\d{1,40}(?=[eE]))(?:[eE][-+]?\d{1,3})?", re.ASCII)
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE = frozenset({"true", "True", "TRUE"})
_FALSE = frozenset({"false", "False", "FALSE"})
_PATH_STEP = re.compile(r"\.([^.\[\]`]+)|\[(\d+)\]")


class YamlError(ValueError):
    """A YAML text was refused; `line` is 1-based, or None where no line applies."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


class Document(NamedTuple):
    """The decoded mapping, and the 1-based line on which each path inside it begins."""

    value: dict[str, Any]
    lines: Mapping[Path, int]

    def line_of(self, path: Path) -> int | None:
        """The line of `path`, or of its nearest parent that has one."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return None


def parse(data: bytes) -> Document:
    """Decode one YAML mapping from `data`; an empty text is an empty mapping.

    Raises: YamlError: for everything the module docstring lists, with the line.
    """
    if len(data) > MAX_BYTES:
        raise YamlError(f"needs at most {MAX_BYTES} bytes, got {len(data)}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise YamlError(f"needs UTF-8, got byte 0x{data[error.start]:02x}", line) from error
    import yaml

    lines: dict[Path, int] = {(): 1}
    try:
        value = _Builder(lines).build(yaml.parse(text, Loader=yaml.CSafeLoader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = mark.line + 1 if mark is not None else text.count("\n", 0, getattr(error, "position", 0)) + 1
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "not YAML"
        raise YamlError(f"is not valid YAML: {problem}", line) from error
    if value is None:
        return Document({}, lines)
    if not isinstance(value, dict):
        raise YamlError(f"needs a mapping of fields at the top, got a {_kind(value)}", 1)
    return Document(value, lines)


def path_in(message: str) -> Path:
    """The path that a msgspec message ends with: ``... - at `$.rules[2].op` `` is ("rules", 2, "op")."""
    _, location, tail = message.rpartition("`$")
    if not location:
        return ()
    return tuple(name or int(index) for name, index in _PATH_STEP.findall(tail))


def suggestion(name: str, candidates: Iterable[str]) -> str:
    """A clause that names the known words closest to `name`, or some of them where none is close."""
    words = sorted(candidates)
    matches = difflib.get_close_matches(name[:MAX_SHOWN], words, n=3, cutoff=0.6)
    if matches:
        return "did you mean " + " or ".join(repr(match) for match in matches) + "?"
    if not words:
        return "none is known here"
    return "known: " + ", ".join(words[:24]) + (", ..." if len(words) > 24 else "")


def quote(value: object) -> str:
    """`repr` of a value from outside, cut so that an error stays readable."""
    if isinstance(value, int) and value.bit_length() > 4096:
        return f"an int of {value.bit_length()} bits"  # Python writes none of some thousand digits
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


class _OpenNode:
    """A mapping or sequence that is still being filled."""

    __slots__ = ("key", "path", "value")

    def __init__(self, value: dict[str, Any] | list[Any], path: Path) -> None:
        self.value = value
        self.path = path
        self.key: str | None = None


class _Builder:
    """Builds plain values straight from parser events, so that nothing is expanded before it is checked."""

    def __init__(self, lines: dict[Path, int]) -> None:
        self.lines = lines
        self.stack: list[_OpenNode] = []
        self.root: Any = None
        self.documents = 0

    def build(self, events: Iterable[Any]) -> Any:
        import yaml

        for event in events:
            line = event.start_mark.line + 1
            if isinstance(event, yaml.AliasEvent):
                raise YamlError(f"alias *{event.anchor} is refused: write the value out", line)
            if isinstance(event, yaml.DocumentStartEvent):
                self.documents += 1
                if self.documents > 1:
                    raise YamlError("needs one document, got a second '---'", line)
            elif isinstance(event, yaml.ScalarEvent):
                self._refuse_extras(event, line)
                self._scalar(event.value, not event.style, line)
            elif isinstance(event, yaml.CollectionStartEvent):
                self._refuse_extras(event, line)
                self._open({} if isinstance(event, yaml.MappingStartEvent) else [], line)
            elif isinstance(event, yaml.CollectionEndEvent):
                self.stack.pop()
        return self.root

    def _refuse_extras(self, event: Any, line: int) -> None:
        if event.anchor is not None:
            raise YamlError(f"anchor &{event.anchor} is refused: write the value out", line)
        if event.tag is not None:
            raise YamlError(f"tag {quote(event.tag)} is refused: types follow from the field", line)

    def _scalar(self, text: str, plain: bool, line: int) -> None:
        parent = self.stack[-1] if self.stack else None
        if parent is not None and isinstance(parent.value, dict) and parent.key is None:
            self._key(parent, parent.value, text, line)
        else:
            self._place(_plain_value(text, line) if plain else text, line)

    def _key(self, parent: _OpenNode, mapping: dict[str, Any], text: str, line: int) -> None:
        if text == "<<":
            raise YamlError("merge key '<<' is refused: write the fields out", line)
        if text in mapping:
            first = self.lines.get((*parent.path, text))
            raise YamlError(f"duplicate key {quote(text)}, first on line {first}", line)
        parent.key = text
        self.lines[(*parent.path, text)] = line

    def _open(self, value: dict[str, Any] | list[Any], line: int) -> None:
        if len(self.stack) >= MAX_DEPTH:
            raise YamlError(f"needs at most {MAX_DEPTH} levels of nesting", line)
        self.stack.append(_OpenNode(value, self._place(value, line)))

    def _place(self, value: Any, line: int) -> Path:
        if not self.stack:
            self.root = value
            return ()
        parent = self.stack[-1]
        if isinstance(parent.value, list):
            path: Path = (*parent.path, len(parent.value))
            parent.value.append(value)
            self.lines[path] = line
            return path
        if parent.key is None:
            raise YamlError(f"a key needs to be a string, got a {_kind(value)}", line)
        path = (*parent.path, parent.key)
        parent.value[parent.key] = value
        parent.key = None
        return path


def _plain_value(text: str, line: int) -> Any:
    if text in _NULL:
        return None
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        number = float(text)
        if not math.isfinite(number):
            raise YamlError(f"number {quote(text)} is out of range", line)
        return number
    return text


def _kind(value: object) -> str:
    names = {dict: "mapping", list: "list", str: "string", bool: "boolean"}
    return names.get(type(value), type(value).__name__)
