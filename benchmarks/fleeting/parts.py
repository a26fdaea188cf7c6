"""The parts of `benchmarks/fleet_cuda.py`, each in a process of its own with a Ray cluster of its own."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from gang_cuda import port
from generating.device_side import deny_for_graphs

import layerzero as lz
from fleeting import hosted, ranks, served
from fleeting.hosted import Load
from layerzero.actors.remote.gpu_claims import GpuClaim

SCRIPT = Path(__file__).resolve().parents[1] / "fleet_cuda.py"
WANTED = {"actor_over_in_process": 0.97, 2: 1.9, 4: 3.7, "actors_over_processes": 0.97}
ROUNDS = 5


class Part:
    """What one part needs: its load, when it has to end, and its rows."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.rows = options, list[dict[str, Any]]()
        tiny = options.device == "cpu"
        self.gpus = options.gpus if tiny else torch.cuda.device_count()
        self.load = (
            Load("cpu", 2, 4, 16, 12) if tiny else Load("cuda", options.layers, options.requests, 1024, 64)
        )
        self.rounds = 1 if tiny else ROUNDS
        self.path = options.out / f"fleet.{options.part}.json"

    @property
    def left_s(self) -> float:
        """Seconds until the part has to end."""
        return float(self.options.until) - time.time()

    def row(self, **said: Any) -> None:
        """Write a row down."""
        self.rows.append(said)
        self.path.write_text(json.dumps(self.rows))
        print(json.dumps(said), flush=True)

    @contextmanager
    def cluster(self, gpus: int) -> Iterator[None]:
        """A Ray cluster of this process's own, with so many GPUs, logical ones in a rehearsal."""
        ray.init("local", num_cpus=max(4, gpus), num_gpus=gpus, include_dashboard=False, log_to_driver=True)
        try:
            yield
        finally:
            ray.shutdown()

    def settings(self, devices: int) -> Any:
        """A runtime with so many Ray actors, and with a device of this process."""
        return lz.Settings(
            cluster="auto", cluster_devices=devices, device=self.load.device, inference=True, perfdb=None,
            warm="eager", freeze_gc=True, hang_s=300.0, max_restarts=20, placement_timeout_s=150.0,
        )  # fmt: skip


def ratio(ours: list[float], other: list[float]) -> float:
    """How much shorter `ours` took than `other`, by the medians."""
    return round(statistics.median(other) / statistics.median(ours), 4)


async def actor(part: Part) -> None:
    """Both sides take turns on one GPU; a side that waits leaves it idle."""
    load = part.load
    with part.cluster(1):
        async with lz.start(part.settings(1)) as runtime:
            pool = runtime.device_pool
            there = (await pool.prepare(hosted.build, load))["gpu-0"]
            here = await hosted.build(load)
            part.row(
                what="setting",
                load=repr(load),
                here=here,
                there=there,
                hardware=str(pool.facts[0].hardware)[:300],
            )
            found: dict[str, list[float]] = {}
            texts: dict[str, Any] = {}

            def note(name: str, value: float) -> None:
                found.setdefault(name, []).append(round(value, 4))

            for turn in range(part.rounds + 1):
                if turn > 2 and part.left_s < 20:
                    break
                took: dict[str, float] = {}
                for side in ("here", "there") if turn % 2 else ("there", "here"):
                    for name, fn in (("decode_ms", hosted.decode), ("prefill_ms", hosted.prefill),
                                     ("request_ms", hosted.streams)):  # fmt: skip
                        value: Any = await (fn(load) if side == "here" else pool.run(fn, load))
                        if name == "decode_ms":
                            value, texts[side] = value
                        took[f"{name} {side}"] = 1e3 / value if name == "request_ms" else value
                took["request_ms streamed"] = 1e3 / await streamed(pool, load, [None])
                for name, each in took.items() if turn else ():
                    note(name, each)
            same = sum(a == b for one, two in zip(texts["here"], texts["there"], strict=True)
                       for a, b in zip(one, two, strict=True))  # fmt: skip
            part.row(
                what="actor", wanted=WANTED["actor_over_in_process"],
                tokens_alike=same / load.requests / load.tokens,
                **{f"{name}_over_in_process": ratio(found[f"{name} there"], found[f"{name} here"])
                   for name in ("decode_ms", "prefill_ms", "request_ms")},
                streamed_over_in_process=ratio(found["request_ms streamed"], found["request_ms here"]),
                medians={name: statistics.median(each) for name, each in found.items()}, rounds=found,
            )  # fmt: skip


async def streamed(pool: Any, load: Any, names: list[str | None], **options: Any) -> float:
    """Tokens a second of `load.requests` streams to each of these devices, received in this process."""
    begin = time.perf_counter()

    async def one(on: str | None, seed: int) -> int:
        stream = pool.stream(hosted.generation, load, seed, load.tokens, on=on, **options)
        return len([token async for token in stream])

    counts = await asyncio.gather(*(one(on, seed) for on in names for seed in range(load.requests)))
    return sum(counts) / (time.perf_counter() - begin)


async def loss(part: Part) -> None:
    """A second device is refused; the first one dies under streams and comes back with its bundle."""
    load, path = part.load, str(part.options.out / "fleet.lzb")
    with part.cluster(1):
        async with lz.start(part.settings(1), scoped=True) as runtime:
            cold = (await runtime.device_pool.prepare(hosted.build, load))["gpu-0"]
            digest = await runtime.device_pool.run(hosted.save, path, load)
        part.row(what="bundle", cold=cold, sha256=digest, bytes=os.path.getsize(path))  # noqa: ASYNC240
        async with lz.start(part.settings(1), scoped=True) as runtime:
            pool = runtime.device_pool
            said = await pool.prepare(hosted.take_bundle, path, digest, load.device)
            warm = (await pool.prepare(hosted.build, load))["gpu-0"]
            part.row(what="bundle taken", said=said["gpu-0"][:500], warm=warm)
            await second_device(part)
            await killed(part, pool, digest)


async def second_device(part: Part) -> None:
    """What a device gets that Ray sends to a GPU that another one has."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus}
    command = [sys.executable, str(SCRIPT), "--out", str(part.options.out), "--device", part.load.device]
    command += ["--as", "second", "--until", str(time.time() + 90)]
    command += ["--node", ray.get_runtime_context().get_node_id()]
    done = await asyncio.to_thread(
        subprocess.run, command, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("second: ")]
    refused = bool(said) and "GPU_TAKEN" in said[-1]
    part.row(what="a second device on the GPU", refused=refused,
             **({} if refused else {"error": (said or [done.stdout[-500:] + done.stderr[-500:]])[-1]}),
             said=said[-1][:500] if said else None)  # fmt: skip


async def second(part: Part) -> None:
    """In a process of its own: another Ray cluster of this host, which knows nothing of the first device."""
    if part.load.device == "cpu":  # logical GPUs are a node's own, so the claim is asked itself
        try:
            GpuClaim(f"{part.options.node}-0", "a second device", 1).acquire(1.0)
            print("second: served")
        except lz.ConfigurationError as refused:
            print("second:", refused.context["reason"], refused)
        return
    with part.cluster(1):
        try:
            async with lz.start(part.settings(1)):
                print("second: served")
        except lz.ConfigurationError as refused:
            print("second:", refused.context.get("reason"), refused)


async def killed(part: Part, pool: Any, digest: str) -> None:
    """SIGKILL in the middle of streams that may resume."""
    load, requests = part.load, min(16, part.load.requests)
    whole = [
        [t async for t in pool.stream(hosted.generation, load, seed, load.tokens)] for seed in range(requests)
    ]
    got: list[list[int]] = [[] for _ in range(requests)]
    stamps: list[float] = []
    errors: list[str] = []
    halfway = asyncio.Event()

    async def one(seed: int) -> None:
        try:
            async for token in pool.stream(hosted.generation, load, seed, load.tokens, resume=True):
                stamps.append(time.perf_counter())
                got[seed].append(token)
                if len(got[seed]) == load.tokens // 3:
                    halfway.set()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}"[:300])

    tasks = [asyncio.ensure_future(one(seed)) for seed in range(requests)]
    await halfway.wait()
    before = pool.facts[0]
    os.kill(before.pid, signal.SIGKILL)
    struck = time.perf_counter()
    await asyncio.gather(*tasks)
    after = [struck, *(at for at in stamps if at > struck)]
    pause = max((b - a, b - struck) for a, b in itertools.pairwise(after))[1] if len(after) > 1 else None
    alike = sum(a == b for one, two in zip(whole, got, strict=True) for a, b in zip(one, two, strict=True))
    part.row(
        what="loss", requests=requests, errors=errors, complete=sum(len(each) == load.tokens for each in got),
        tokens_alike=alike / requests / load.tokens, seconds_until_tokens_again=pause and round(pause, 2),
        new_process=pool.facts[0].pid != before.pid, bundle_carried=digest in await pool.run(hosted.bundles),
        health=[f"{each.name} {each.state.value} {each.restarts}" for each in await pool.health()],
    )  # fmt: skip
    if errors:
        raise RuntimeError(errors[0])


async def fleet(part: Part) -> None:
    """One replica with its requests, and one on every GPU with as many each."""
    load, gpus = part.load, part.gpus
    with part.cluster(gpus):
        async with lz.start(part.settings(gpus)) as runtime:
            pool = runtime.device_pool
            names = list(pool.devices)
            part.row(what="setting", load=repr(load), built=await pool.prepare(hosted.build, load))
            counts = sorted({1, 2, gpus})
            found: dict[str, list[float]] = {}
            for turn in range(part.rounds + 1):
                if turn > 2 and part.left_s < 15:
                    break
                for count in counts:
                    on = [names[(turn + number) % gpus] for number in range(count)]
                    decoded = await asyncio.gather(*(pool.run(hosted.decode, load, on=name) for name in on))
                    speeds = {
                        f"{count}": sum(load.requests / step_ms * 1e3 for step_ms, _ in decoded),
                        f"{count} streamed": await streamed(pool, load, [*on]),
                    }
                    for name, value in speeds.items() if turn else ():
                        found.setdefault(name, []).append(round(value, 2))
            medians = {name: statistics.median(each) for name, each in found.items()}
            for count in counts[1:]:
                part.row(
                    what="fleet", replicas=count, wanted=WANTED.get(count),
                    over_one=round(medians[f"{count}"] / medians["1"], 4),
                    over_one_streamed=round(medians[f"{count} streamed"] / medians["1 streamed"], 4),
                )  # fmt: skip
            part.row(what="tokens a second", medians=medians, rounds=found)


async def lost(part: Part) -> None:
    """A replica is killed while all stream: every stream has its whole text, and the replica serves again."""
    load, gpus = part.load, part.gpus
    requests = load.requests * (gpus - 1)  # whose pages the replicas that remain have
    with part.cluster(gpus):
        async with lz.start(part.settings(gpus)) as runtime:
            pool = runtime.device_pool
            await pool.prepare(hosted.build, load)
            texts: list[list[list[int]]] = []
            times: list[float] = []
            struck = 0.0
            victim = pool.facts[-1]
            for strike in (False, True):
                got: list[list[int]] = [[] for _ in range(requests)]
                texts.append(got)

                async def one(seed: int, got: list[list[int]] = got) -> None:
                    stream = pool.stream(hosted.generation, load, seed, load.tokens, resume=True)
                    async for token in stream:
                        got[seed].append(token)
                        times.append(time.perf_counter())

                tasks = [asyncio.ensure_future(one(seed)) for seed in range(requests)]
                if strike:
                    while min(map(len, got)) < load.tokens // 4:  # noqa: ASYNC110  under load, all of them
                        await asyncio.sleep(0.01)
                    os.kill(victim.pid, signal.SIGKILL)
                    struck = time.perf_counter()
                ended = await asyncio.gather(*tasks, return_exceptions=True)
            errors = [f"{type(e).__name__}: {e}"[:300] for e in ended if isinstance(e, BaseException)]
            whole_s = time.perf_counter() - struck
            after = sorted([struck, *(at for at in times if at > struck)])
            await pool.run(hosted.decode, load, 4, on=victim.name)
            back_s = time.perf_counter() - struck
            whole, cut = texts
            same = sum(
                a == b for one_, two in zip(whole, cut, strict=True) for a, b in zip(one_, two, strict=False)
            )
            part.row(
                what="lost", replicas=gpus, requests=requests, errors=errors,
                tokens_wanted=requests * load.tokens, tokens=sum(map(len, cut)),
                complete=sum(len(each) == load.tokens for each in cut),
                tokens_alike=same / requests / load.tokens,
                longest_pause_s=round(max(b - a for a, b in itertools.pairwise(after)), 3),
                all_texts_after_s=round(whole_s, 2), replica_serves_again_after_s=round(back_s, 2),
                new_process=next(f for f in pool.facts if f.name == victim.name).pid != victim.pid,
                health=[f"{each.name} {each.state.value} {each.restarts}" for each in await pool.health()],
            )  # fmt: skip
            if errors or sum(map(len, cut)) != requests * load.tokens:
                raise RuntimeError(f"streams ended with {errors[:1]}, {sum(map(len, cut))} tokens")


async def group(part: Part) -> None:
    """The same two ranks with the same captured steps, in actors and in processes, in turns."""
    load, tiny = part.load, part.load.device == "cpu"
    log = part.options.out / "fleet.group.launched.log"
    build = partial(ranks.build, load)
    with part.cluster(2), ranks.Launched(load, 2, port(), log) as launched:
        async with (
            lz.start(part.settings(2)),
            lz.remote_rank_group(build, 2, collectives="gloo" if tiny else "nccl", timeout_s=120.0) as actors,
        ):
            part.row(what="setting", load=repr(load), plan=actors.plan_digest, ranks=actors.ranks)
            found: dict[str, list[float]] = {"actors": [], "processes": []}
            for turn in range(part.rounds + 2):  # two warm up
                if turn > 3 and part.left_s < 15:
                    break
                took = {
                    "actors": await actors.run(ranks.step_ms, load, load.tokens),
                    "processes": await launched.ask(load.tokens),
                }
                for name, value in took.items() if turn > 1 else ():
                    found[name].append(round(value, 4))
            part.row(
                what="group", wanted=WANTED["actors_over_processes"],
                actors_over_processes=ratio(found["actors"], found["processes"]),
                step_ms={name: statistics.median(each) for name, each in found.items()}, rounds=found,
            )  # fmt: skip


OWN = {
    "actor": actor, "loss": loss, "fleet": fleet, "group": group, "second": second, "lost": lost,
    "served": served.served,
}  # fmt: skip


def be(options: argparse.Namespace) -> int:
    """Run one part in this process."""
    deny_for_graphs()  # also in the actors and processes that it starts
    part = Part(options)

    async def limited() -> None:
        async with asyncio.timeout(max(1.0, part.left_s)):
            await OWN[options.part](part)

    try:
        asyncio.run(limited())
    except BaseException as error:
        part.row(what=options.part, error=f"{type(error).__name__}: {error}"[:1500])
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0
