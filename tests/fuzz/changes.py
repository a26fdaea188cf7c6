"""How an input of a fuzz run is made out of another: bytes, words of the format, values of a JSON tree."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

MAX_LEN = 8192
# What has broken parsers: bounds of number types, of nesting and of text, and values of another kind.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 0.0, -0.0,
    1e308, -1e-320, float("inf"), float("-inf"), float("nan"), "", " ", "*", "a" * 300, "\0", "\ud800",
    "../x", "2026-11-23", "9999999", [], [[]], {}, {"": {}}, [0] * 40,
)  # fmt: skip


def mutated(data: bytes, corpus: Sequence[bytes], words: Sequence[bytes], random: Random) -> bytes:
    """`data` after one to four changes, at most `MAX_LEN` bytes; `corpus` and `words` are taken from."""
    for _ in range(random.randint(1, 4)):
        change = random.choice(_CHANGES)
        data = change(data, corpus, words, random)[:MAX_LEN]
    return data


def _flip(data: bytes, corpus: Sequence[bytes], words: Sequence[bytes], random: Random) -> bytes:
    if not data:
        return random.randbytes(4)
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


def _cut(data: bytes, corpus: Sequence[bytes], words: Sequence[bytes], random: Random) -> bytes:
    start, end = sorted(random.randrange(len(data) + 1) for _ in range(2))
    return data[:start] + data[end:] if random.random() < 0.8 else data[start:end]


def _repeat(data: bytes, corpus: Sequence[bytes], words: Sequence[bytes], random: Random) -> bytes:
    start, end = sorted(random.randrange(len(data) + 1) for _ in range(2))
    return data[:end] + data[start:end] * random.choice((1, 2, 40)) + data[end:]


def _word(data: bytes, corpus: Sequence[bytes], words: Sequence[bytes], random: Random) -> bytes:
    at = random.randrange(len(data) + 1)
    word = random.choice(words) if words and random.random() < 0.7 else random.randbytes(random.randint(1, 9))
    return data[:at] + word + data[at + random.choice((0, 0, len(word))) :]


def _splice(data: bytes, corpus: Sequence[bytes], words: Sequence[bytes], random: Random) -> bytes:
    other = random.choice(corpus)
    return data[: random.randrange(len(data) + 1)] + other[random.randrange(len(other) + 1) :]


def _number(data: bytes, corpus: Sequence[bytes], words: Sequence[bytes], random: Random) -> bytes:
    """A whole number of four or eight bytes, in either order, as binary formats have them."""
    width = random.choice((2, 4, 8))
    top = 1 << 8 * width
    value = random.choice((0, 1, top - 1, top // 2, top // 2 - 1, len(data) % top, random.randrange(top)))
    at = random.randrange(len(data) + 1)
    return data[:at] + value.to_bytes(width, random.choice(("big", "little"))) + data[at + width :]


def _deep(data: bytes, corpus: Sequence[bytes], words: Sequence[bytes], random: Random) -> bytes:
    """Nesting that a parser which calls itself does not survive, in JSON, YAML, TOML or msgpack."""
    at = random.randrange(len(data) + 1)
    opening = random.choice((b"[", b'{"":', b"- ", b"\x91", b"\x81\xa1x"))
    return data[:at] + opening * (MAX_LEN // 2 // len(opening)) + data[at:]


def _tree(data: bytes, corpus: Sequence[bytes], words: Sequence[bytes], random: Random) -> bytes:
    """One value of a JSON text replaced, removed, doubled or wrapped."""
    try:
        root = json.loads(data)
    except (ValueError, RecursionError):
        return _word(data, corpus, words, random)
    if not isinstance(root, dict | list) or not root:
        return json.dumps(random.choice(VALUES)).encode()
    holder, key = _place(root, random)
    _TREE_CHANGES[random.randrange(len(_TREE_CHANGES))](holder, key, random)
    return json.dumps(root).encode("utf-8", "surrogatepass")


def _place(root: Any, random: Random) -> tuple[Any, Any]:
    """A container of the tree and one of its keys, deep ones as likely as high ones."""
    places = []
    waiting = [root]
    while waiting:
        held = waiting.pop()
        keys = list(held) if isinstance(held, dict) else list(range(len(held)))
        places += [(held, key) for key in keys]
        waiting += [held[key] for key in keys if isinstance(held[key], dict | list)]
    place: tuple[Any, Any] = random.choice(places)
    return place


def _set(holder: Any, key: Any, random: Random) -> None:
    holder[key] = random.choice(VALUES)


def _remove(holder: Any, key: Any, random: Random) -> None:
    del holder[key]


def _double(holder: Any, key: Any, random: Random) -> None:
    if isinstance(holder, list):
        holder.insert(key, holder[key])
    else:
        holder[f"{key}{random.randrange(3)}"] = holder[key]


def _wrap(holder: Any, key: Any, random: Random) -> None:
    holder[key] = [holder[key]] if random.random() < 0.5 else {"": holder[key]}


def _near(holder: Any, key: Any, random: Random) -> None:
    value = holder[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        holder[key] = str(value)
    else:
        holder[key] = random.choice((value + 1, value - 1, -value, value * 2**20, str(value)))


_TREE_CHANGES: tuple[Callable[[Any, Any, Random], None], ...] = (_set, _set, _remove, _double, _wrap, _near)
_CHANGES = (_flip, _cut, _repeat, _word, _word, _splice, _number, _deep, _tree, _tree, _tree)
