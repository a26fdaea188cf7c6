"""The selection table: hits, misses, first calls, what a hit allocates, hits while policies swap."""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import Plan, distribution, interleave, singles, summary, us
from torch import Tensor

import layerzero as lz
from layerzero.actors.device.local_device import LocalDevice
from layerzero.actors.device.registry import Registry
from layerzero.backends import load_builtin
from layerzero.ops import table as ops_table
from layerzero.selection.plan import load_until_best
from layerzero.selection.policy import program
from layerzero.selection.policy.policy import EMPTY, Policy

FEATURES = frozenset({"causal", "scale", "gqa", "bias", "mask_bool", "mask_float", "window", "empty_rows"})
THREADS = (1, 4, 16, 64)
ATTENTION = ops_table.get("attention")


def _settled(device: LocalDevice, plan: Callable[[], Any]) -> None:
    """Look at memory and load what the first choice found cold now: later either would change the tables."""
    plan()
    device.wait_for_costs()
    device.loader.close(60.0)  # what loads in the background would make a generation in the midst of a row
    if device.workspace_budget.refresh(device.settings):
        device.refresh()
    load_until_best(lambda: plan().selection, device.warm)


# -- a: hits --------------------------------------------------------------------------------------------


def hits(plan: Plan, device: LocalDevice, args: tuple[Tensor, ...]) -> dict[str, Any]:
    """Row a: a lookup with a signature made before, alone and from many threads."""
    signature, full = ATTENTION.build(*args)
    bits = device.mode()
    _settled(device, lambda: device.plan(ATTENTION, signature, full, bits))

    def lookup() -> Any:
        return device.snapshot.tables["attention"].by_signature[bits][signature]

    def method() -> Any:
        return device.plan(ATTENTION, signature, full, bits)

    arms = interleave(plan, lookup=lookup, empty=lambda: None, method=method)
    loop = _in_loop(plan, device, signature, bits)
    single = distribution(singles(lookup, plan.singles * 10))
    totals = _scaling(plan, device, signature, bits)
    return {
        "hit": loop,
        "hit_in_a_function": us(arms["lookup"]),
        "empty_function": us(arms["empty"]),
        "device_plan": us(arms["method"]),
        "single_hits": single,
        "hits_per_s": {side: {str(n): round(v) for n, v in by.items()} for side, by in totals.items()},
        "relative_to_one": {
            side: {str(n): round(v / by[1], 3) for n, v in by.items()} for side, by in totals.items()
        },
    }


def _scaling(plan: Plan, device: LocalDevice, signature: Any, bits: int) -> dict[str, dict[int, float]]:
    """Hits a second of wall time that threads reach together: medians of interleaved spans.

    Beside the snapshot stands the same table behind one lock, which is what it would be without snapshots.
    """
    spans: dict[str, dict[int, list[float]]] = {
        side: {count: [] for count in THREADS} for side in ("snapshot", "behind a lock")
    }
    for _ in range(9):
        for count in THREADS:
            for side, by in spans.items():
                by[count].append(
                    _span(device, signature, bits, count, plan.seconds / 20, locked=side != "snapshot")
                )
    return {side: {count: statistics.median(v) for count, v in by.items()} for side, by in spans.items()}


def _in_loop(plan: Plan, device: LocalDevice, signature: Any, bits: int) -> dict[str, Any]:
    """The lookup as the call has it, in a loop, less the loop."""
    count = 20_000
    wall, cpu = [], []
    for _ in range(plan.rounds):
        begin, ran = time.perf_counter_ns(), time.thread_time_ns()
        for _ in itertools.repeat(None, count):
            device.snapshot.tables["attention"].by_signature[bits][signature]
        middle, half = time.perf_counter_ns(), time.thread_time_ns()
        for _ in itertools.repeat(None, count):
            pass
        wall.append((2 * middle - begin - time.perf_counter_ns()) / count)
        cpu.append((2 * half - ran - time.thread_time_ns()) / count)
    return {"wall_us": summary(wall, 1e-3), "cpu_us": summary(cpu, 1e-3)}


def _span(
    device: LocalDevice, signature: Any, bits: int, count: int, seconds: float, *, locked: bool
) -> float:
    done = [0] * count
    stop = False
    gate = threading.Barrier(count + 1)
    lock = threading.Lock()

    def worker(index: int) -> None:
        mine = 0
        gate.wait()
        while not stop:
            if locked:
                for _ in itertools.repeat(None, 500):
                    with lock:
                        device.snapshot.tables["attention"].by_signature[bits][signature]
            else:
                for _ in itertools.repeat(None, 500):
                    device.snapshot.tables["attention"].by_signature[bits][signature]
            mine += 500
        done[index] = mine

    threads = [threading.Thread(target=worker, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    gate.wait()
    begin = time.perf_counter()
    time.sleep(seconds)
    stop = True
    for thread in threads:
        thread.join()
    return sum(done) / max(time.perf_counter() - begin, 1e-9)


# -- c: misses ------------------------------------------------------------------------------------------


def misses(plan: Plan) -> dict[str, Any]:
    """Row c: signatures that nobody has asked for, with many kernels and with many rules."""
    builtin = [kernel for kernel in load_builtin() if not kernel.slow_import]
    ops = sorted({kernel.op for kernel in builtin})
    hundred = _filled(builtin, 100, ops)
    # Names and patterns that match no kernel here: each rule is looked at, none changes the choice.
    patterns = [f"absent.attention.k{i}" if i % 2 else f"absent{i}.*" for i in range(100)]
    rules = Policy(tuple(rule for p in patterns for rule in program.exclusion(p, op="attention").rules))
    return {
        "builtin kernels": _miss(plan, builtin, EMPTY),
        "100 kernels": _miss(plan, hundred, EMPTY),
        "100 kernels of one op": _miss(plan, _filled(builtin, 100, ["attention"]), EMPTY),
        "1000 kernels": _miss(plan, _filled(builtin, 1000, ops), EMPTY),
        "100 kernels, 100 rules": _miss(plan, hundred, rules),
        "new signature, known key": _miss(plan, hundred, EMPTY, known=True),
        "kernels of an op": {str(n): _by_op(plan, builtin, n, ops) for n in (10, 100, 1000, 10_000)},
    }


def _filled(builtin: Sequence[lz.Kernel], count: int, ops: Sequence[str]) -> list[lz.Kernel]:
    """The built-in kernels and copies of the library defaults under other names, `count` together."""
    kernels = list(builtin)
    model = {kernel.op: kernel for kernel in builtin if kernel.op in ops and kernel.default}
    model |= {kernel.op: kernel for kernel in builtin if kernel.op in ops and kernel.op not in model}
    for index, op in zip(range(max(0, count - len(kernels))), itertools.cycle(ops), strict=False):
        like = model[op]
        kernels.append(
            lz.Kernel(
                id=f"bench.{op}.k{index}",
                op=op,
                backend="bench",
                capability=like.capability,
                load=like.load,
                efficiency=like.efficiency,
                tie_break_order=60,
            )
        )
    return kernels


def _miss(plan: Plan, kernels: Sequence[lz.Kernel], policy: Policy, *, known: bool = False) -> dict[str, Any]:
    """Microseconds of a first sight of a signature; `known`: its key was decided before."""
    device = LocalDevice("cpu", lz.Settings(), Registry(kernels, lambda _: []), policy=policy)
    bits = device.mode()
    calls = []
    heads = itertools.count(1)
    for _ in range(max(20, plan.rounds)):
        tokens = 17 if known else 16
        shape = (1, 8, tokens, 8 * next(heads))
        if known:  # sizes between two grid points share a key
            shape = (1, 8, 1025 + len(calls), 64)
        calls.append(ATTENTION.build(*(torch.empty(shape) for _ in range(3))))
    if known:
        warm = ATTENTION.build(*(torch.empty(1, 8, 1024 + 512, 64) for _ in range(3)))
        device.plan(ATTENTION, *warm, bits)
    else:
        device.plan(ATTENTION, *calls.pop(0), bits)
    wall, cpu = [], []
    for signature, args in calls:
        begin, ran = time.perf_counter_ns(), time.thread_time_ns()
        device.plan(ATTENTION, signature, args, bits)
        wall.append(float(time.perf_counter_ns() - begin))
        cpu.append(float(time.thread_time_ns() - ran))
    device.close()
    return {"wall_us": summary(wall, 1e-3), "cpu_us": summary(cpu, 1e-3), "kernels": len(kernels)}


def _by_op(plan: Plan, builtin: Sequence[lz.Kernel], count: int, ops: Sequence[str]) -> dict[str, Any]:
    registry = Registry(_filled(builtin, count, ops)[:count], lambda _: [])
    return us(interleave(plan, call=lambda: registry.for_op("attention"))["call"])


# -- d: fresh processes -----------------------------------------------------------------------------------

_FRESH = """
import json, time
clock = time.perf_counter_ns
begin = clock(); import torch; torch_ns = clock() - begin
q, k, v = (torch.randn(1, 8, 16, 64) for _ in range(3))
if {direct}:
    torch.nn.functional.scaled_dot_product_attention(q, k, v)
begin = clock(); import layerzero as lz; import_ns = clock() - begin
import gc
paused = [0, 0]
def watch(phase, info): paused[phase == "stop"] += clock()
gc.callbacks.append(watch)
begin = clock(); lz.sync.attention(q, k, v); first_ns = clock() - begin
gc.callbacks.remove(watch)
begin = clock(); lz.sync.attention(q, k, v); second_ns = clock() - begin
begin = clock(); lz.sync.rms_norm(q); other_ns = clock() - begin
print(json.dumps([torch_ns, import_ns, first_ns, first_ns - paused[1] + paused[0], second_ns, other_ns]))
"""
_STEPS = (
    "torch_us", "import_us", "first_call_us", "first_call_less_collector_us", "second_call_us", "other_op_us",
)  # fmt: skip


def first_calls(plan: Plan) -> dict[str, Any]:
    """Row d: in fresh processes after `import torch`: the import, the first call, the next ones.

    The bytecode is in place, as an installed package has it: before several runs one is not counted.
    `warm_torch` has called torch's own attention before, so that what is left is ours alone.
    """
    result: dict[str, Any] = {}
    if plan.processes > 1:
        _fresh(False)
    for name, direct in (("", False), ("warm_torch_", True)):
        runs = [_fresh(direct) for _ in range(plan.processes)]
        columns = list(zip(*runs, strict=True))
        for column, label in zip(columns, _STEPS, strict=True):
            result[name + label] = summary(column, 1e-3)
    return result


def _fresh(direct: bool) -> list[float]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", _FRESH.format(direct=direct)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return [float(value) for value in json.loads(done.stdout)]


# -- allocation, swaps ------------------------------------------------------------------------------------


def allocation(plan: Plan, args: tuple[Tensor, ...]) -> dict[str, Any]:
    """Blocks that hits leave behind (PS-012): a lookup, a blocking call and a bound one, 1e5 times each."""
    count = 100_000 if plan.rounds > 10 else 1000
    bound = lz.bind("attention", *args)
    device = _device()
    signature, full = ATTENTION.build(*args)
    bits = device.mode()
    device.plan(ATTENTION, signature, full, bits)
    return {
        "calls": count,
        "lookup": _left(count, lambda: device.snapshot.tables["attention"].by_signature[bits][signature]),
        "sync": _left(count // 10, lambda: lz.sync.attention(*args)),
        "bound": _left(count // 10, lambda: bound(*args)),
    }


def _left(count: int, call: Callable[[], Any]) -> int:
    for _ in range(100):
        call()
    before = sys.getallocatedblocks()
    for _ in itertools.repeat(None, count):
        call()
    return sys.getallocatedblocks() - before


def _device() -> LocalDevice:
    from layerzero.runtime import current

    return current().device("cpu")


def swaps(plan: Plan, keys: int = 1000, readers: int = 8, hertz: float = 100.0) -> dict[str, Any]:
    """PS-026: `readers` threads select among live keys while the policy is swapped `hertz` times a second.

    `quiet` is the same without swaps. `other op` swaps rules that cannot change these verdicts, `same op`
    rules that drop every entry. `spinning` readers do nothing but select, so that seven of eight wait for the
    interpreter whatever is swapped; `paced` ones select once in `PACE_S`, as threads of a server do, and what
    they wait is what a selection and a swap cost. `frozen` are those under `Settings(freeze_gc=True)`:
    without it a full collection falls into some selection and takes 70 ms and more over torch's own objects.
    """
    span = plan.seconds
    rules = {
        "quiet": (0.0, None),
        "other op": (hertz, ("rms_norm", "torch.rms_norm.native")),
        "same op": (hertz, ("attention", "torch.attention.sdpa_cpu")),
    }
    result: dict[str, Any] = {"keys": keys, "readers": readers, "pace_s": PACE_S}
    for name, pause in READERS.items():
        if name == "frozen":
            gc.collect()
            gc.freeze()
        result[name] = {
            label: _swapped(keys, readers, rate, span, rule, pause) for label, (rate, rule) in rules.items()
        }
    gc.unfreeze()
    return result


PACE_S = 0.002
READERS = {"spinning": 0.0, "paced": PACE_S, "frozen": PACE_S}


def _swapped(
    keys: int, readers: int, hertz: float, seconds: float, rule: tuple[str, str] | None, pause: float
) -> dict[str, Any]:
    device = LocalDevice("cpu", lz.Settings(), Registry(load_builtin(), lambda _: []))
    bits = device.mode()
    shapes = [(1, 1 + n % 10, 1 + n // 10, 64) for n in range(keys)]
    calls = [ATTENTION.build(*(torch.empty(shape) for _ in range(3))) for shape in shapes]
    for signature, args in calls:
        device.plan(ATTENTION, signature, args, bits)
    policies = [EMPTY] if rule is None else [EMPTY, program.preference(rule[1], op=rule[0])]
    stop = threading.Event()
    latencies: list[list[int]] = [[] for _ in range(readers)]
    cpus: list[list[int]] = [[] for _ in range(readers)]

    def read(index: int) -> None:
        mine, ran = latencies[index], cpus[index]
        for n in itertools.count(index * 97):
            if stop.is_set():
                return
            signature, args = calls[n % keys]
            cpu, begin = time.thread_time_ns(), time.perf_counter_ns()
            device.plan(ATTENTION, signature, args, bits)
            mine.append(time.perf_counter_ns() - begin)
            ran.append(time.thread_time_ns() - cpu)
            if pause:
                time.sleep(pause)

    threads = [threading.Thread(target=read, args=(index,)) for index in range(readers)]
    for thread in threads:
        thread.start()
    swapped, until = 0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        if hertz:
            swapped += 1
            device.set_policy(policies[swapped % len(policies)])
        time.sleep(1 / (hertz or 100.0))
    stop.set()
    for thread in threads:
        thread.join()
    device.close()
    return {
        "swaps": swapped,
        "selections": sum(map(len, latencies)),
        "wall": distribution([float(v) for mine in latencies for v in mine]),
        "cpu": distribution([float(v) for mine in cpus for v in mine]),
    }
