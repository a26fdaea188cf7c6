"""Into how many parts decoding cuts sequences."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from layerzero.ops.paged.splitting import parts_of
from tests.profiles import many_examples


@many_examples
@given(st.integers(0, 1 << 14), st.integers(0, 1 << 20), st.integers(1, 256))
def test_parts_fill_the_device_and_no_more(programs: int, most_tokens: int, processors: int) -> None:
    """A power of two up to 64, of at least 128 tokens each, and no cut where programs are plenty."""
    parts = parts_of(programs, most_tokens, processors)
    assert parts & (parts - 1) == 0 and 1 <= parts <= 64
    assert parts == 1 or most_tokens // parts >= 128
    assert parts == 1 or parts * programs <= 4 * processors
    if programs > 2 * processors:
        assert parts == 1
    if programs == 1 and processors >= 32 and most_tokens >= 1 << 13:
        assert parts == 64
