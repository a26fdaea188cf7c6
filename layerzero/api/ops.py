"""The blocking ops, one a definition; `layerzero.sync` is their public name."""

from __future__ import annotations

from layerzero.api.calls import blocking
from layerzero.ops import table as ops_table

BLOCKING = {name: blocking(ops_table.get(name)) for name in ops_table.names()}
