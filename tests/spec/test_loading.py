"""How an adapter of a library's function becomes the `load` of a kernel."""

from typing import Any, NamedTuple

from layerzero.spec.kernel import loading


class Pair(NamedTuple):
    """The arguments of an op of two."""

    first: int
    second: int


def test_an_adapter_gets_the_library_before_the_arguments_of_the_op() -> None:
    """The library is looked for when the kernel is loaded, once, and never by a call."""
    looked: list[str] = []

    def find() -> str:
        looked.append("here")
        return "library"

    @loading(find)
    def load(library: Any, *args: int) -> tuple[Any, ...]:
        return library, *args

    assert looked == []
    call = load()
    assert call(1, 2) == ("library", 1, 2)
    assert call(3, 4) == ("library", 3, 4)
    assert looked == ["here"]


def test_an_adapter_may_take_a_record_of_the_arguments() -> None:
    """An op of many arguments reaches its adapters by name, not by position."""

    @loading(lambda: "library", Pair)
    def load(library: Any, pair: Pair) -> tuple[Any, int]:
        return library, pair.first - pair.second

    assert load()(5, 3) == ("library", 2)
