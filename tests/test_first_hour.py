"""What a newcomer meets in the first hour: short reprs, complete help, names that exist, a quick command."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import layerzero as lz
from layerzero.cli import COMMANDS, first_line, main
from layerzero.observe.counters import Counters
from layerzero.ops import table as ops_table
from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[1]


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """A line of a shell, with `lz` as `python -m layerzero`."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "LZ": f"{sys.executable} -m layerzero"}
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=variables,
        check=False,
    )


def test_what_a_repl_shows_is_a_line_and_what_print_shows_is_a_table() -> None:
    """An explanation, the last selection, counters, a runtime: short as a repr, readable in print."""
    q = torch.randn(1, 4, 16, 32)
    lz.sync.attention(q, q, q)
    explained, last = lz.explain("attention", q, q, q), lz.last_selection()
    assert last is not None
    for shown in (explained, last):
        assert len(repr(shown)) < 120 and "attention" in repr(shown)
        assert "torch.attention.sdpa_cpu" in str(shown) and str(shown).count("\n") > 3
        assert shown._repr_html_().count("<tr>") > 3
    with lz.start(lz.Settings(warm="off"), scoped=True) as runtime:
        assert repr(runtime) == "<Runtime open: no device yet>"
        runtime.device("cpu")
        assert repr(runtime) == "<Runtime open: cpu>"
    assert repr(runtime) == str(runtime) == "<Runtime closed: cpu>"
    counters = Counters()
    counters.add("selections", op="<b>")
    assert repr(counters) == "<Counters 1 series of 1 counters>"
    assert str(counters) == "selections{op=<b>} 1" and "&lt;b&gt;" in counters._repr_html_()


@pytest.mark.parametrize("name", ops_table.names())
def test_help_names_every_parameter_that_a_call_takes(name: str) -> None:
    """`help(lz.op)` and its signature have what concerns choosing and waiting; help says what is first."""
    awaited, blocking = getattr(lz, name), getattr(lz.sync, name)
    waiting = {"backend", "priority", "timeout", "batching"}
    assert waiting <= set(inspect.signature(awaited).parameters)
    assert set(inspect.signature(blocking).parameters) & waiting == {"backend"}
    for parameter in waiting:
        assert parameter in awaited.__doc__
    assert "priority is 0 (first), 1 or 2 (last)" in awaited.__doc__ and "backend" in blocking.__doc__
    assert (
        inspect.signature(awaited).return_annotation
        == inspect.signature(ops_table.get(name).reference).return_annotation
    )


def test_the_list_of_commands_needs_no_torch() -> None:
    """`lz --help` imports neither torch nor a command; each line is the command's own first sentence."""
    program = (
        "import sys\nfrom layerzero.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as ended:\n    assert ended.code == 0\n"
        "assert 'torch' not in sys.modules and 'layerzero.cli.explain' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        command = main.commands.get(name) or main.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None and command.help is not None
        first = " ".join(command.help.split("\n\n")[0].split()).split(". ")[0].rstrip(".")
        assert first_line(name) == first and name in done.stdout


def test_a_reader_that_has_gone_is_no_error() -> None:
    """`lz kernels | head -1` ends with status 0 and without a word, also under pipefail."""
    done = shell("$LZ kernels | head -1")
    assert (done.returncode, done.stderr) == (0, "") and "kernels" in done.stdout


def test_an_imagined_gpu_has_a_compute_capability_that_exists() -> None:
    """`--sm 91` is refused with the list; 90 is answered."""
    wrong = shell("$LZ which rms_norm --shape 4x4096:bf16 --sm 91")
    assert wrong.returncode == 2 and "90" in wrong.stderr and "91" in wrong.stderr
    assert shell("$LZ which rms_norm --shape 4x4096:bf16 --sm 90").returncode == 0


def test_public_modules_are_attributes_and_torch_may_come_later() -> None:
    """`lz.kvcache` and `lz.metrics` need no import of their own; torch may be imported after layerzero."""
    program = (
        "import sys, layerzero as lz\nassert 'torch' not in sys.modules\n"
        "import torch\nassert lz.kvcache.PagedCache and lz.metrics\n"
        "assert lz.sync.rms_norm(torch.ones(1, 4)).shape == (1, 4)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_an_unknown_op_is_a_value_error_with_the_nearest_name() -> None:
    """It is the caller's word that is wrong, not the kernels."""
    with pytest.raises(ValueError, match="did you mean attention"):
        lz.explain("atention", torch.ones(1))
    assert not issubclass(lz.UnknownOpError, lz.NoKernelFoundError)
