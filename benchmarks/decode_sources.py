"""Other texts of decode.cu, which `decode_codes.py` times beside it: exchanges in its text.

`one load`: a lane loads one of a tile's scales of tokens and gets the rest from its neighbours, in place of
four loads in every lane. `one page` has that, too, and reads one entry of the table a tile: sixteen tokens
that begin at a multiple of sixteen lie in one page, where pages have a multiple of sixteen.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

SOURCE = Path(__file__).resolve().parents[1] / "layerzero" / "backends" / "cuda_kernels" / "decode.cu"
Exchanges = tuple[tuple[str, str], ...]
_ONE_LOAD: Exchanges = (
    (
        "  float k_scale[2], v_scale[2];  // of tokens g and g + 8\n",
        "  float scale;  // by lane: of keys g and g + 8, then the logarithms of those of values\n",
    ),
    (
        """#if BY_TOKEN
      const i64 place = page * scale_page + (i64)(token % PAGE) * scale_token + (i64)head * scale_head;
      tile.k_scale[i] = k_scale[place];
      tile.v_scale[i] = v_scale[place];
#endif
    }
""",
        """    }
#if BY_TOKEN
    {
      const int token = min(start + g + t % 2 * 8, last - 1);
      const i64 page = (i64)table[token / PAGE];
      const i64 place = page * scale_page + (i64)(token % PAGE) * scale_token + (i64)head * scale_head;
      tile.scale = (t < 2 ? k_scale : v_scale)[place];
    }
#endif
""",
    ),
    (
        "    float p[4];  // of tokens g and g + 8, heads 2t and 2t + 1 each\n",
        """    float p[4];  // of tokens g and g + 8, heads 2t and 2t + 1 each
#if BY_TOKEN
    const float mine = t < 2 ? now.scale : __log2f(now.scale);
    const float of_keys[2] = {__shfl_sync(FULL, mine, lane & ~3), __shfl_sync(FULL, mine, lane & ~3 | 1)};
    const float of_values[2] = {__shfl_sync(FULL, mine, lane & ~3 | 2), __shfl_sync(FULL, mine, lane | 3)};
#endif
""",
    ),
    ("p[i] *= now.k_scale[i / 2];", "p[i] *= of_keys[i / 2];"),
    (
        "{p[n] + __log2f(now.v_scale[0]), p[n + 2] + __log2f(now.v_scale[1])}",
        "{p[n] + of_values[0], p[n + 2] + of_values[1]}",
    ),
)
_ONE_PAGE: Exchanges = (
    (
        """    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = min(start + g + 8 * i, last - 1);
      const i64 page = (i64)table[token / PAGE];
      const u8* row = k + page * k_page + (i64)(token % PAGE) * k_token + (i64)head * k_head;
""",
        """    // Sixteen tokens from a multiple of sixteen lie in one page.
    const i64 page = (i64)table[start / PAGE];
    const int slot = start % PAGE, rest = last - 1 - start;
    const u8* k_from = k + page * k_page + (i64)head * k_head;
    const u8* v_from = v + page * v_page + (i64)head * v_head + 16 * g;
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u8* row = k_from + (slot + min(g + 8 * i, rest)) * k_token;
""",
    ),
    (
        """      const int token = min(start + g + t % 2 * 8, last - 1);
      const i64 page = (i64)table[token / PAGE];
      const i64 place = page * scale_page + (i64)(token % PAGE) * scale_token + (i64)head * scale_head;
""",
        """      const int at = slot + min(g + t % 2 * 8, rest);
      const i64 place = page * scale_page + at * scale_token + head * scale_head;
""",
    ),
    (
        """      const int token = min(start + 2 * t + i % 2 + i / 2 * 8, last - 1);
      const i64 page = (i64)table[token / PAGE];
      tile.values[i] = load_once(
          v + page * v_page + (i64)(token % PAGE) * v_token + (i64)head * v_head + 16 * g);
""",
        """      tile.values[i] = load_once(v_from + (slot + min(2 * t + i % 2 + i / 2 * 8, rest)) * v_token);
""",
    ),
)
VARIANTS: Mapping[str, Exchanges] = MappingProxyType(
    {"as it is": (), "one load": _ONE_LOAD, "one page": _ONE_LOAD + _ONE_PAGE}
)


def source(variant: str) -> str:
    """The text of a variant.

    Raises: ValueError: decode.cu has changed, and an exchange has no place in it.
    """
    text = SOURCE.read_text()
    for old, new in VARIANTS[variant]:
        if text.count(old) != 1:
            raise ValueError(f"{SOURCE.name} needs this once for {variant!r}, got {text.count(old)}: {old}")
        text = text.replace(old, new)
    return text
