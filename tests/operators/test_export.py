"""`torch.export` and AOTInductor: dynamic shapes, and the kernel chosen where the program runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

import layerzero as lz
from tests import children
from tests.operators.test_compile import Small

BATCH, TOKENS = torch.export.Dim("batch", max=64), torch.export.Dim("tokens", max=512)

RUN = """
import sys, torch, layerzero as lz
program = torch.export.load(sys.argv[1])
x = torch.load(sys.argv[2])
lz.lock("rms_norm", "reference.rms_norm")
with torch.no_grad():
    out = program.module()(x)
torch.save((out, lz.which("rms_norm", x, torch.ones(32))), sys.argv[3])
"""

PACKAGED = """
import sys, torch
import layerzero.integrations.torch_ops
import layerzero as lz
run = torch._inductor.aoti_load_package(sys.argv[1])
lz.lock("attention", "reference.attention")
with torch.no_grad():
    for path, into in zip(sys.argv[2::2], sys.argv[3::2]):
        torch.save(run(torch.load(path)), into)
"""

WITHOUT = """
import sys
sys.modules["layerzero"] = None
import torch
try:
    program = torch.export.load(sys.argv[1])
    program.module()(torch.load(sys.argv[2]))
except Exception as error:
    print(type(error).__name__, error)
"""


def exported(strict: bool = False) -> torch.export.ExportedProgram:
    """A small model with any batch and any number of tokens."""
    with torch.no_grad():
        return torch.export.export(
            Small().eval(), (torch.randn(3, 7, 32),), dynamic_shapes=({0: BATCH, 1: TOKENS},), strict=strict
        )


def child(code: str, *arguments: Path, **environment: str) -> str:
    """What a program prints in a process of its own."""
    variables = os.environ | environment
    done = children.run(code, *map(str, arguments), folder=arguments[0].parent, variables=variables)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("strict", [False, True])
def test_a_program_holds_operators_and_runs_at_other_sizes(strict: bool) -> None:
    """No kernel of the day is in the graph."""
    model, program = Small().eval(), exported(strict)
    targets = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    assert {f"layerzero.{n}.default" for n in ("rms_norm", "attention", "add_rms_norm", "mlp")} <= targets
    assert not any("scaled_dot_product" in target for target in targets)
    with torch.no_grad():
        for shape in ((1, 1, 32), (5, 33, 32)):
            x = torch.randn(shape)
            torch.testing.assert_close(program.module()(x), model(x))


def test_a_saved_program_chooses_in_the_process_that_runs_it(tmp_path: Path) -> None:
    """Under another policy, without tables or measurements of ours."""
    torch.export.save(exported(), tmp_path / "model.pt2")
    x = torch.randn(2, 19, 32)
    torch.save(x, tmp_path / "x")
    child(
        RUN, tmp_path / "model.pt2", tmp_path / "x", tmp_path / "out",
        LAYERZERO_SHIPPED_TABLES="false", LAYERZERO_PERFDB="none",
    )  # fmt: skip
    out, kernel = torch.load(tmp_path / "out")
    assert kernel == "reference.rms_norm"
    with torch.no_grad():
        torch.testing.assert_close(out, Small().eval()(x))


def test_without_the_library_a_program_says_what_is_missing(tmp_path: Path) -> None:
    """torch names the operators, whose namespace is the name to install."""
    torch.export.save(exported(), tmp_path / "model.pt2")
    torch.save(torch.randn(2, 19, 32), tmp_path / "x")
    assert "layerzero.rms_norm" in child(WITHOUT, tmp_path / "model.pt2", tmp_path / "x")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_a_package_of_aotinductor_runs_the_operators_at_other_sizes(tmp_path: Path) -> None:
    """C++ around them, in a process with another policy."""
    package = torch._inductor.aoti_compile_and_package(exported(), package_path=str(tmp_path / "model.pt2"))
    arguments = [Path(package)]
    inputs = [torch.randn(2, 19, 32), torch.randn(5, 4, 32)]
    for number, x in enumerate(inputs):
        torch.save(x, tmp_path / f"x{number}")
        arguments += [tmp_path / f"x{number}", tmp_path / f"out{number}"]
    child(PACKAGED, *arguments)
    with torch.no_grad():
        for number, x in enumerate(inputs):
            torch.testing.assert_close(
                torch.load(tmp_path / f"out{number}"), Small().eval()(x), rtol=1e-4, atol=1e-5
            )


def test_sizes_that_follow_from_data_are_exported() -> None:
    """Rows that a mask leaves: how many is known when the program runs."""

    class Chosen(torch.nn.Module):
        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            return lz.sync.rms_norm(x[keep])

    x, keep = torch.randn(6, 8), torch.tensor([True, False, True, True, False, False])
    program = torch.export.export(Chosen(), (x, keep))
    for chosen in (keep, ~keep, torch.zeros(6, dtype=torch.bool)):
        torch.testing.assert_close(program.module()(x, chosen), lz.sync.rms_norm(x[chosen]))
