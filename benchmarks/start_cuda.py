"""From the start of a process to its first token, with nothing compiled before and with a warm-up bundle.

    python benchmarks/start_cuda.py --out FOLDER [--layers 32] [--wait-s 300] [--only cold,bundle,again]
    python benchmarks/start_cuda.py --rehearse      # a tiny model on the CPU: shows that everything runs

A Llama of 8B's shape with random weights answers one prompt. Each process is fresh and has cache folders of
its own, empty but for what its bundle brings: "cold" compiles, serves meanwhile, and writes the bundle;
"bundle" loads it; "again" is a cold process that finds the caches of the first. Times are seconds from the
start of the process, the load of the model taken out. A token counts as by graph when no compiler is at work
and nothing is loaded any more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

STARTED = time.monotonic()
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT)]
RESULTS = ROOT / "benchmarks" / "results" / "start_h200.json"
PROMPT, LIMIT, PAGE_SIZE, PAGES = 128, 2048, 16, 1024
QUIET_S = 3.0  # nothing was loaded for so long: what was wanted is there
# Where libraries keep what they compile, as variables of theirs and ours.
CACHES = ("XDG_CACHE_HOME", "FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
KINDS = ("cold", "bundle", "again")


def serve(options: argparse.Namespace) -> dict[str, Any]:
    """One process: what it took to each point, and how long its steps were while kernels came."""
    import torch
    from generating import models

    import layerzero as lz

    record: dict[str, Any] = {"imported_s": time.monotonic() - STARTED}
    settings = lz.Settings(device=options.device, inference=True, state_dir=str(options.state))
    with lz.start(settings) as runtime:
        if options.bundle is not None and not options.save:
            loaded = lz.load_bundle(options.bundle, sha256=options.sha256, device=options.device)
            record["bundle"] = str(loaded)
            record["bundle_loaded_s"] = time.monotonic() - STARTED
        begin = time.monotonic()
        config = models.SHAPES["tiny" if options.rehearse else "8b-8"]
        config = config if options.rehearse else replace(config, num_hidden_layers=options.layers)
        dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
        model = models.llama.random(
            config, device=options.device, dtype=dtype, pages=PAGES, page_size=PAGE_SIZE
        )
        if options.device != "cpu":
            torch.cuda.synchronize()
        loading = time.monotonic() - begin
        record |= {"shape": models.described(config), "model_load_s": loading}
        device = runtime.device(options.device)
        record |= answer(options, model, device, loading)
        record["kernels"] = kernels(device)
        if options.save:
            manifest = lz.Manifest.of_model(described(config), rows=(1, PROMPT), dtype=str(dtype)[6:])
            bundle = lz.save_bundle(options.bundle, manifest, device=options.device)
            record["saved"] = {
                "sha256": bundle.sha256, "members": bundle.members, "calls": len(manifest.calls),
                "bytes": options.bundle.stat().st_size,
            }  # fmt: skip
    return record


def described(config: Any) -> dict[str, Any]:
    """A shape as a model's own config.json has it."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    more = {name: getattr(config, name) for name in (*names, "rms_norm_eps", "vocab_size")}
    return {"model_type": "llama", **more}


def answer(options: argparse.Namespace, model: Any, device: Any, loading: float) -> dict[str, Any]:
    """Draw tokens until nothing is loaded any more: the first, the last that waited, the first by graph."""
    import torch
    from models.sampling import SampleArgs

    draw = SampleArgs(temperature=0.0, top_p=1.0, seed=0, offset=0)
    sequence = model.cache.sequence(1)
    ids = torch.arange(PROMPT, device=options.device) % model.config.vocab_size
    version, changed_at, slowest, count = -1, time.monotonic(), 0.0, 0
    found: dict[str, Any] = {}
    while True:
        begin = time.monotonic()
        if sequence.length >= LIMIT:
            sequence.close()
            sequence, ids = model.cache.sequence(1), ids[:1]
        span = sequence.extend(ids.shape[0])
        ids = model.sample_next_batch(ids, [span], [draw]).reshape(-1)
        ids.tolist()
        count += 1
        now = time.monotonic()
        if count == 1:
            found["first_token_s"] = now - STARTED - loading
        else:
            slowest = max(slowest, now - begin)
        if device.dispatch_version != version or device.loader.loading:
            version, changed_at = device.dispatch_version, now
            found["ready_s"], found["tokens_before_ready"] = now - STARTED - loading, count
        if now - changed_at > (0.5 if options.rehearse else QUIET_S):
            break
        if now - STARTED > options.wait_s:
            found["cut_off"] = f"still changing after {options.wait_s:g} s"
            break
    steps = [timed_step(model, sequence, ids, draw) for _ in range(20)]
    return found | {"slowest_step_meanwhile_s": slowest, "step_ms_when_ready": 1e3 * sorted(steps)[10]}


def timed_step(model: Any, sequence: Any, ids: Any, draw: Any) -> float:
    """The seconds of one more token."""
    begin = time.monotonic()
    model.sample_next_batch(ids, [sequence.extend(1)], [draw]).tolist()
    return time.monotonic() - begin


def kernels(device: Any) -> list[str]:
    """The kernels that serve the calls of the run now."""
    tables = device.snapshot.tables.values()
    return sorted({plan.kernel for table in tables for plan in table.by_key.values()})


def prebuilt() -> list[str]:
    """FlashInfer's modules that are installed compiled, as its `jit-cache` wheel brings them."""
    try:
        from flashinfer.jit import env
    except ImportError:
        return []
    return sorted(path.name for path in Path(env.FLASHINFER_AOT_DIR).glob("*") if path.is_dir())


def child(kind: str, options: argparse.Namespace, folder: Path, sha256: str) -> dict[str, Any]:
    """The record of a fresh process of one kind."""
    home = folder / ("cold" if kind == "again" else kind)
    variables = {name: str(home / name.lower()) for name in CACHES}
    for path in variables.values():
        Path(path).mkdir(parents=True, exist_ok=True, mode=0o700)
    if options.rehearse:  # compiling our own C++ is what other benchmarks show
        variables |= {"LAYERZERO_NATIVE": "off", "LAYERZERO_DENY": "native.*,zentorch.*"}
    command = [
        sys.executable,
        __file__,
        "--child",
        kind,
        "--device",
        options.device,
        "--state",
        str(home / "state"),
    ]
    command += ["--layers", str(options.layers), "--wait-s", str(options.wait_s)]
    command += ["--rehearse"] if options.rehearse else []
    if kind != "again":
        command += ["--bundle", str(folder / "warm.lzb")]
    command += {"cold": ["--save"], "bundle": ["--sha256", sha256 or "0" * 64], "again": []}[kind]
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False,
        timeout=options.wait_s + 300,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{kind}: status {done.returncode}: {done.stderr[-1500:]}")
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=None, help="folder or file of the record")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--wait-s", type=float, default=300.0, help="the most that one process may take")
    parser.add_argument("--only", default=",".join(KINDS), help="which processes, of cold,bundle,again")
    parser.add_argument("--rehearse", action="store_true")
    for name, kind in (("child", str), ("device", str), ("state", Path), ("bundle", Path), ("sha256", str)):
        parser.add_argument(f"--{name}", type=kind, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.device = options.device or ("cpu" if options.rehearse else "cuda")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run every kind and write the record; status 1 where one failed."""
    options = parsed(arguments)
    if options.child:
        print(json.dumps(serve(options)))
        return 0
    from harness import environment, write

    out = options.out or (None if options.rehearse else RESULTS)
    out = out / RESULTS.name if out is not None and out.suffix != ".json" else out
    packages = ("layerzero-runtime", "torch", "triton", "flashinfer-python")
    record: dict[str, Any] = {"environment": environment(packages), "starts": {}, "errors": {}}
    record["prebuilt_modules"] = prebuilt()
    sha256 = ""
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        for kind in (kind for kind in KINDS if kind in options.only.split(",")):
            try:
                found = record["starts"][kind] = child(kind, options, Path(folder), sha256)
            except (RuntimeError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
                record["errors"][kind] = str(error)[-1500:]
                print(f"{kind}: {record['errors'][kind]}", file=sys.stderr)
            else:
                sha256 = found.get("saved", {}).get("sha256", sha256)
                print(
                    f"{kind}: first token {found['first_token_s']:.1f} s, ready {found['ready_s']:.1f} s",
                    flush=True,
                )
            if out is not None:
                write(out, record)
    return 1 if record["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
