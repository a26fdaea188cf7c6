"""`torch.export` and AOTInductor: dynamic shapes, and the kernel chosen where the program runs."""

from __future__ import annotations

import functools
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
    if sys.argv[1] == "package":
        run = torch._inductor.aoti_load_package(sys.argv[2])
    else:
        run = torch.export.load(sys.argv[2]).module()
    run(torch.load(sys.argv[3]))
except Exception as error:
    print(type(error).__name__, error)
else:
    print("it ran")
"""


@functools.cache
def exported(strict: bool = False) -> torch.export.ExportedProgram:
    """A small model with any batch and any number of tokens."""
    with torch.no_grad(), lz.prefer("torch.*"):
        return torch.export.export(
            Small().eval(), (torch.randn(3, 7, 32),), dynamic_shapes=({0: BATCH, 1: TOKENS},), strict=strict
        )


def said_without_the_library(what: str, path: Path, folder: Path) -> str:
    """What a process prints that has no layerzero and runs what was exported."""
    torch.save(torch.randn(2, 19, 32), folder / "x")
    done = children.run(WITHOUT, what, str(path), str(folder / "x"), folder=folder)
    assert done.returncode == 0, done.stderr
    assert "it ran" not in done.stdout
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model, compiled into C++ around our operators."""
    path = tmp_path_factory.mktemp("package") / "model.pt2"
    return Path(torch._inductor.aoti_compile_and_package(exported(), package_path=str(path)))


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


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_saved_program_chooses_in_the_process_that_runs_it(strict: bool, tmp_path: Path) -> None:
    """Its kernels and its policy, call by call, without tables or measurements of ours."""
    torch.export.save(exported(strict), tmp_path / "model.pt2")
    need_choice_at_run_time("program", tmp_path / "model.pt2", tmp_path)


def test_without_the_library_a_program_says_what_is_missing(tmp_path: Path) -> None:
    """torch names the operator, whose namespace is the name to import, and says to import it."""
    torch.export.save(exported(), tmp_path / "model.pt2")
    said = said_without_the_library("program", tmp_path / "model.pt2", tmp_path)
    assert "torch.ops.layerzero.rms_norm.default" in said and "Please import the custom op" in said


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_a_package_of_aotinductor_runs_the_operators_at_other_sizes(package: Path, tmp_path: Path) -> None:
    """C++ around them; the kernels are the other process's, as its policy says."""
    need_choice_at_run_time("package", package, tmp_path)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_without_the_library_a_package_says_what_is_missing(package: Path, tmp_path: Path) -> None:
    """torch names the operator."""
    assert "layerzero::" in said_without_the_library("package", package, tmp_path)


def test_a_number_that_follows_from_a_size_stays_symbolic() -> None:
    """An argument that is no tensor is no constant of the example's."""

    class Sloped(torch.nn.Module):
        def forward(self, slopes: Tensor, x: Tensor) -> Tensor:
            return lz.sync.alibi(slopes, x.shape[0], x.shape[1])

    slopes = torch.rand(4)
    shapes = {"slopes": None, "x": {0: TOKENS, 1: torch.export.Dim("keys", max=512)}}
    program = torch.export.export(Sloped(), (slopes, torch.ones(5, 7)), dynamic_shapes=shapes)
    for size in ((3, 4), (6, 19)):
        found = program.module()(slopes, torch.ones(size))
        torch.testing.assert_close(found, lz.sync.alibi(slopes, *size))


def test_sizes_that_follow_from_data_are_exported() -> None:
    """Rows that a mask leaves: how many is known when the program runs."""

    class Chosen(torch.nn.Module):
        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            return lz.sync.rms_norm(x[keep])

    x, keep = torch.randn(6, 8), torch.tensor([True, False, True, True, False, False])
    program = torch.export.export(Chosen(), (x, keep))
    for chosen in (keep, ~keep, torch.zeros(6, dtype=torch.bool)):
        torch.testing.assert_close(program.module()(x, chosen), lz.sync.rms_norm(x[chosen]))
