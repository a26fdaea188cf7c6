"""How one field of a request is read: each reader returns the value or refuses it by the field's name."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

Reader = Callable[[str, Any], Any]


class BadRequest(Exception):
    """The request cannot be served as it is; `param` names the field."""

    status = 400
    code: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class OtherTokenizer(BadRequest):
    """Another tokenizer is meant than the one that is served; `code` says how they differ."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message, "tokenizer")
        self.code = code


class UnknownModel(BadRequest):
    """Another model is asked for than the one that is served."""

    status = 404
    code = "model_not_found"


def brief(value: Any) -> str:
    """What was given, as it goes into a message."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def integer(low: int, high: int) -> Reader:
    """An integer from `low` to `high`."""

    def read(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadRequest(f"{name} needs a whole number, got {brief(value)}", name)
        if not low <= value <= high:
            raise BadRequest(f"{name} needs {low} to {high}, got {brief(value)}", name)
        return value

    return read


def number(low: float, high: float, *, above: bool = False) -> Reader:
    """A number from `low`, or from above it, to `high`."""
    bounds = f"to be above {low:g} and at most {high:g}" if above else f"{low:g} to {high:g}"

    def read(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadRequest(f"{name} needs a number, got {brief(value)}", name)
        if not low <= value <= high or (above and value == low):
            raise BadRequest(f"{name} needs {bounds}, got {brief(value)}", name)
        return float(value)

    return read


def boolean(name: str, value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise BadRequest(f"{name} needs true or false, got {brief(value)}", name)
    return value


def text(name: str, value: Any) -> str:
    """A string without half a character, which JSON can spell and no tokenizer can read."""
    if not isinstance(value, str):
        raise BadRequest(f"{name} needs a string, got {brief(value)}", name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"{name} needs whole characters, got half a pair at {error.start}", name) from error
    return value


def strings(most: int) -> Reader:
    """A string, or a list of at most `most`, none of them empty."""

    def read(name: str, value: Any) -> tuple[str, ...]:
        words = [value] if isinstance(value, str) else value
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise BadRequest(f"{name} needs a string or a list of strings, got {brief(value)}", name)
        if len(words) > most or "" in words:
            raise BadRequest(
                f"{name} needs at most {most} strings, none of them empty, got {brief(value)}", name
            )
        return tuple(text(name, word) for word in words)

    return read


def nothing(*neutral: Any) -> Reader:
    """A value that asks for nothing: True is no 1, and False no 0."""

    def read(name: str, value: Any) -> None:
        if not any(
            value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral
        ):
            raise BadRequest(f"{name} is not supported, got {brief(value)}", name)

    return read


def keyed(name: str, value: Any, known: Collection[str], needed: Collection[str] = ()) -> dict[str, Any]:
    """An object of known keys."""
    if not isinstance(value, dict):
        raise BadRequest(f"{name} needs an object, got {brief(value)}", name)
    for key in value:
        if key not in known:
            raise BadRequest(f"{name} needs keys among {sorted(known)}, got {brief(key)}", name)
    for key in needed:
        if value.get(key) is None:
            raise BadRequest(f"{name} needs {key}", name)
    return value
