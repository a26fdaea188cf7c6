"""The type of the `lz` fixture."""

from collections.abc import Callable

from click.testing import Result

Lz = Callable[..., Result]
