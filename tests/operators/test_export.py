"""`torch.export` and AOTInductor: dynamic shapes, and the kernel chosen where the program runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.selection.cost.roofline import ROOFLINE
from tests import children
from tests.operators.test_compile import Small

BATCH, TOKENS = torch.export.Dim("batch", max=64), torch.export.Dim("tokens", max=512)

RUNS = {"rms_norm": 1, "linear": 2, "attention": 1, "add_rms_norm": 1, "mlp": 1, "layer_norm": 1}
"""How often a run of the small model calls each op."""

RUN = """
import sys, torch
what, ops, path, into, *inputs = sys.argv[1:]
if what == "package":
    import layerzero.integrations.torch_ops
    run = torch._inductor.aoti_load_package(path)
else:
    import layerzero
    run = torch.export.load(path).module()
import layerzero as lz
from layerzero.ops import table
from tests.kernels import EVERYTHING, kernel

def own(op):
    def count(*full):
        counts[op] = counts.get(op, 0) + 1
        return table.get(op).reference(*full)
    return kernel(f"theirs.{op}", count, features=EVERYTHING | {"prefill", "kv_strided"})

found = []
with lz.start(lz.Settings.load(device="cpu", warm="off")) as runtime, torch.no_grad():
    priced = {c.accepted.source for c in lz.select("rms_norm", torch.ones(2, 8)).trace if c.accepted}
    for op in ops.split():
        runtime.add_kernel(own(op))
    for policy in ({"prefer": "theirs.*"}, {"deny": "theirs.*"}, {"prefer": "theirs.*"}):
        lz.reset_policy()
        lz.add_policy(**policy)
        for name in inputs:
            counts = {}
            found.append((run(torch.load(name)), counts))
torch.save((priced, found), into)
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
    with torch.no_grad(), lz.prefer("torch.*"):
        return torch.export.export(
            Small().eval(), (torch.randn(3, 7, 32),), dynamic_shapes=({0: BATCH, 1: TOKENS},), strict=strict
        )


def child(code: str, *arguments: Path, **environment: str) -> str:
    """What a program prints in a process of its own."""
    variables = os.environ | environment
    done = children.run(code, *map(str, arguments), folder=arguments[0].parent, variables=variables)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def need_choice_at_run_time(what: str, path: Path, folder: Path) -> None:
    """Run what was exported in a process that has kernels of its own, and a policy for them that moves."""
    inputs = [torch.randn(2, 19, 32), torch.randn(5, 4, 32)]
    for number, x in enumerate(inputs):
        torch.save(x, folder / f"x{number}")
    names = [str(folder / f"x{number}") for number in range(len(inputs))]
    done = children.run(
        RUN, what, " ".join(RUNS), str(path), str(folder / "out"), *names, folder=folder,
        variables=os.environ | {"LAYERZERO_SHIPPED_TABLES": "false", "LAYERZERO_PERFDB": "none"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    priced, found = torch.load(folder / "out")
    assert priced == {ROOFLINE}
    assert [counts for _, counts in found] == [*(RUNS, RUNS), *({}, {}), *(RUNS, RUNS)]
    with torch.no_grad():
        wanted = [Small().eval()(x) for x in inputs]
    for number, (out, _) in enumerate(found):
        torch.testing.assert_close(out, wanted[number % len(inputs)], rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize("strict", [False, True])
def test_a_saved_program_chooses_in_the_process_that_runs_it(strict: bool, tmp_path: Path) -> None:
    """Its kernels and its policy, call by call, without tables or measurements of ours."""
    torch.export.save(exported(strict), tmp_path / "model.pt2")
    need_choice_at_run_time("program", tmp_path / "model.pt2", tmp_path)


def test_without_the_library_a_program_says_what_is_missing(tmp_path: Path) -> None:
    """torch names the operators, whose namespace is the name to install."""
    torch.export.save(exported(), tmp_path / "model.pt2")
    torch.save(torch.randn(2, 19, 32), tmp_path / "x")
    assert "layerzero.rms_norm" in child(WITHOUT, tmp_path / "model.pt2", tmp_path / "x")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_a_package_of_aotinductor_runs_the_operators_at_other_sizes(tmp_path: Path) -> None:
    """C++ around them; the kernels are the other process's, as its policy says."""
    package = torch._inductor.aoti_compile_and_package(exported(), package_path=str(tmp_path / "model.pt2"))
    need_choice_at_run_time("package", Path(package), tmp_path)


def test_sizes_that_follow_from_data_are_exported() -> None:
    """Rows that a mask leaves: how many is known when the program runs."""

    class Chosen(torch.nn.Module):
        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            return lz.sync.rms_norm(x[keep])

    x, keep = torch.randn(6, 8), torch.tensor([True, False, True, True, False, False])
    program = torch.export.export(Chosen(), (x, keep))
    for chosen in (keep, ~keep, torch.zeros(6, dtype=torch.bool)):
        torch.testing.assert_close(program.module()(x, chosen), lz.sync.rms_norm(x[chosen]))
