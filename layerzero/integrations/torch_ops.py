"""Importing this module defines every operator of `torch.ops.layerzero`.

`import layerzero` is enough where Python asks torch for an operator, as `torch.export.load` does: it is
defined when it is asked for. A package of AOTInductor asks for operators by name without Python, and so does
TorchScript.
"""

from __future__ import annotations

from layerzero.operators import define_all

OPERATORS = define_all()
