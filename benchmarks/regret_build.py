"""Kernels that compile on their first call, compiled by many processes at once before anything is timed.

`python -m benchmarks.regret --build-s 150` calls this: the calls that will be measured are sorted by what
their kernels compile (`Kernel.unit`), each process takes some of these units and runs a small and a large
call of each once. What is compiled stays in the libraries' own caches on disk.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import layerzero as lz
from benchmarks.regret_shapes import asked, shapes
from layerzero.actors.device.local_device import LocalDevice
from layerzero.measure.calls import Call
from layerzero.measure.shapes import standard_calls
from layerzero.measure.tuning import missing_calls
from layerzero.ops import table as ops_table
from layerzero.perfdb.shipped import fitting_tables
from layerzero.selection.cost.cost_model import TABLES
from layerzero.spec.kernel import Kernel

# FlashAttention-4 keeps what it compiled on disk where it is told to.
CACHES = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
_LARGEST = 1 << 30

Job = tuple[str, Call]  # a kernel, and a call to run on it


def build(device: str, workers: int, limit_s: float, quick: bool, only: Sequence[str] = ()) -> dict[str, Any]:
    """Compile in `workers` processes for at most `limit_s` seconds; `units` names what was done.

    `only` are arguments that leave out calls: `--missing`, `--parts` and its names.
    """
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="regret-build-"))
    command = [sys.executable, "-m", "benchmarks.regret_build", "--device", device, "--of", str(workers)]
    command += ["--done", str(folder), "--limit-s", str(limit_s), *(["--quick"] if quick else []), *only]
    running = [
        subprocess.Popen(
            [*command, "--part", str(part)],
            env={**os.environ, **CACHES, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        for part in range(workers)
    ]
    ended = 0
    for process in running:
        try:
            process.wait(max(0.1, started + limit_s - time.monotonic()))
            ended += process.returncode == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its compilers, too: they would run beside what is timed
    units = sorted(line for path in folder.iterdir() for line in path.read_text().splitlines())
    seconds = round(time.monotonic() - started, 1)
    return {"workers": workers, "ended": ended, "seconds": seconds, "units": units}


def in_order(device: LocalDevice, calls: Sequence[Call], built: Collection[str]) -> list[Call]:
    """The calls, those last for which some kernel would have to compile what is not among `built`."""
    return sorted(calls, key=lambda call: any(unit not in built for unit in _units(device, call)))


def _units(device: LocalDevice, call: Call) -> list[str]:
    request = call.request(device.hardware)
    takes = {c.kernel for c in device.table(ops_table.get(call.op)).recompute(request).trace if c.eligible}
    kernels = [k for k in device.registry.for_op(call.op) if k.id in takes and k.compile_key is not None]
    return [f"{template(k)} {k.compile_key(request)}" for k in kernels if k.compile_key is not None]


def template(kernel: Kernel) -> str:
    """What kernels that compile the same sources have in common."""
    return f"{kernel.backend} {kernel.id.rpartition('.')[2]}"


def jobs(device: LocalDevice, calls: Iterable[Call]) -> dict[tuple[str, str], list[Job]]:
    """The smallest and the largest call of every form of every unit that kernels compile, by template."""
    found: dict[tuple[str, str], dict[object, list[Job]]] = defaultdict(dict)
    for call in sorted(calls, key=Call.operand_bytes):
        if call.operand_bytes() > _LARGEST:
            continue
        op = ops_table.get(call.op)
        request = call.request(device.hardware)
        selection = device.table(op).recompute(request)
        for candidate in selection.trace:
            kernel = device.registry.get(candidate.kernel)
            if not candidate.eligible or kernel is None or kernel.compile_key is None:
                continue
            form = (kernel.id, request.features, request.dims.get("Sq") == 1, request.dims.get("P"))
            group = found[(template(kernel), kernel.compile_key(request))].setdefault(form, [])
            group[1:] = [(kernel.id, call)]
    return {unit: [job for group in forms.values() for job in group] for unit, forms in found.items()}


def _run(device: LocalDevice, job: Job) -> str:
    kernel_id, call = job
    op = ops_table.get(call.op)
    args = call.make(device.device)
    table = device.table(op)
    try:
        selection = table.recompute(table.describe(args, device.mode()))
        device.callable_for(op, selection, kernel_id)(*args)
        if device.device.type == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def main() -> None:
    """Do one part of the jobs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--of", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=150.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--missing", action="store_true", help="of the tuned calls only these")
    parser.add_argument("--parts", nargs="+", help="of the shapes only these")
    parser.add_argument("--done", type=Path, required=True, help="folder to note compiled units in")
    options = parser.parse_args()
    deadline = time.monotonic() + options.limit_s
    torch.set_num_threads(1)
    with lz.start(lz.Settings(device=options.device, warm="off", perfdb=None)) as runtime, torch.no_grad():
        device = runtime.device()
        kind = device.device.type
        wanted = asked(shapes(kind, options.quick), options.parts)
        tuned: Sequence[Call] = standard_calls(None, kind, options.quick)
        if options.missing:
            shipped = fitting_tables(device.hardware, TABLES)[:1]
            tuned = missing_calls(device, tuned, [row for table in shipped for row in table.rows])
        calls = [*(shape.call for shape in wanted), *tuned]
        found = jobs(device, calls)
        # The slowest compiler first, so that none of its modules waits for the end.
        units = sorted(
            found.items(), key=lambda item: (not item[0][0].endswith("fa3"), -len(item[1]), item[0])
        )
        for (name, unit), own in units[options.part :: options.of]:
            began, wrong = time.monotonic(), []
            for job in own:
                if time.monotonic() > deadline:
                    wrong.append("no time left")
                    break
                wrong += [why for why in [_run(device, job)] if why]
            print(f"built {name} {unit}: {time.monotonic() - began:.1f} s {wrong[:2] or ''}", flush=True)
            if "no time left" not in wrong:
                with (options.done / str(options.part)).open("a") as note:
                    note.write(f"{name} {unit}\n")


if __name__ == "__main__":
    main()
