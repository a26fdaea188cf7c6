"""A YAML or JSON file that a user wrote: its values, and errors that name its lines."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from layerzero._util.files import read_given
from layerzero._util.strict_yaml import MAX_BYTES, Document, Path, YamlError, parse, quote, suggestion
from layerzero.spec.errors import ConfigurationError


class UserFile:
    """The mapping in a file: `value`, and the line of each of its parts.

    `data` are its bytes where they have been read; `kind` is the class of its errors.
    Raises: ConfigurationError: it cannot be read, or is no mapping in YAML as `strict_yaml` takes it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        data: bytes | None = None,
        kind: type[ConfigurationError] = ConfigurationError,
    ) -> None:
        self.path = os.fspath(path)
        self._kind = kind
        self._document = Document({}, {})
        try:
            self._document = parse(self._read() if data is None else data)
        except OSError as error:
            raise self.error((), f"cannot be read: {error.strerror}") from error
        except YamlError as error:
            where = f"{self.path}:{error.line}" if error.line else self.path
            raise kind(f"{where}: {error}", path=self.path, line=error.line) from error
        self.value: dict[str, Any] = self._document.value

    def _read(self) -> bytes:
        try:
            return read_given(self.path, MAX_BYTES)
        except ValueError as error:
            raise YamlError(f"needs at most {MAX_BYTES} bytes, got more") from error

    def line_of(self, *place: str | int) -> int | None:
        """The line of a part, or of its nearest parent that has one."""
        return self._document.line_of(place)

    def error(self, place: Path, message: str, **context: Any) -> ConfigurationError:
        """The error that `message` is, with the file and the line of a part of it."""
        line = self.line_of(*place)
        where = f"{self.path}:{line}" if line else self.path
        return self._kind(f"{where}: {message}", path=self.path, line=line, **context)

    def refuse_unknown(self, names: Iterable[str], known: Iterable[str], what: str, place: Path = ()) -> None:
        """Raise for the first of `names` that is not known, with those that are near it."""
        for name in names:
            if name not in known:
                message = f"unknown {what} {quote(name)}: {suggestion(name, known)}"
                raise self.error((*place, name), message, field=name)
