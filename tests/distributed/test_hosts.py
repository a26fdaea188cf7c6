"""Two hosts with a cable between them: what each part of the library does when the network fails.

A host is a network namespace; where no process of its own is needed there, it is a thread that entered one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosting.namespaces import ADDRESSES, Network, cut, mend, shape, why_not
from layerzero.actors.group import agreement
from layerzero.actors.remote import stores
from layerzero.actors.remote.stores import TorchStore, open_store
from layerzero.sharing import work
from layerzero.sharing.leases import Leases
from layerzero.spec.errors import DeviceLostError
from tests.children import Child
from tests.distributed import forked
from tests.distributed.on_hosts import SOON_S, at, store_of
from tests.sharing.test_work import wait_for
from tests.waiting import LIMIT_S


class BlindStore(TorchStore):
    """A store whose guard is taken away: it writes whatever is stored already."""

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        self.set(key, desired)
        return desired


# -- split brain ----------------------------------------------------------------------------------------


def led_twice(hosts: Network, kind: type[TorchStore]) -> list[tuple[bytes, bool]]:
    """What two processes take for the answer, of which one led, was cut off, and was replaced meanwhile."""
    client = store_of(hosts, kind)
    working, go_on = threading.Event(), threading.Event()

    def slow() -> bytes:
        working.set()
        assert go_on.wait(LIMIT_S)
        return b"of the second host"

    def answer(number: int, work: Callable[[], bytes]) -> Future[Any]:
        leases = Leases(client(number), 0.3)
        return at(hosts, number, lambda: leases.once("key", work, reuse=True, wait_s=LIMIT_S, poll_s=0.01))

    second = answer(2, slow)
    assert working.wait(LIMIT_S)
    first_leases = Leases(client(1), 0.3)
    cut(hosts.cable)
    quick = lambda: b"of the first host"  # noqa: E731
    first = at(hosts, 1, lambda: first_leases.once("key", quick, reuse=True, wait_s=LIMIT_S, poll_s=0.01))
    answers = [first.result(LIMIT_S)]
    mend(hosts.cable)
    go_on.set()
    return [*answers, second.result(LIMIT_S)]


def test_of_two_that_lead_on_both_sides_of_a_cut_the_answer_of_one_counts(hosts: Network) -> None:
    """The one that was cut off is replaced, cannot store its answer, and takes that of its successor."""
    assert led_twice(hosts, TorchStore) == [(b"of the first host", True), (b"of the first host", False)]


def test_without_compare_and_set_two_leaders_would_have_two_answers(hosts: Network) -> None:
    """The same cut, with the guard taken away: what the test above is able to see."""
    assert {answer for answer, _ in led_twice(hosts, BlindStore)} == {
        b"of the first host", b"of the second host",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "moment"),
    [(TorchStore, "before the vote"), (TorchStore, "after the vote"), (BlindStore, "after the vote")],
)
def test_ranks_on_both_sides_of_a_cut_learn_one_outcome(
    hosts: Network, monkeypatch: pytest.MonkeyPatch, moment: str, kind: type[TorchStore]
) -> None:
    """Who did not learn it in time aborts, too late where rank 0 decided. Without the guard they differ."""
    monkeypatch.setattr(stores, "_ANSWER_S", SOON_S)
    client = store_of(hosts, kind)
    rank0, rank1, after = client(1), client(2), client(2)
    learned = threading.Event()

    def vote(plan: bytes) -> None:
        if moment == "before the vote":
            cut(hosts.cable)

    def follow() -> Any:
        plan = rank1.get("p/plan", LIMIT_S)
        assert plan is not None
        vote(plan)
        rank1.set("p/vote/1", b"yes")
        if moment == "after the vote":
            assert learned.wait(LIMIT_S)  # rank 0 has decided, and its word is on the way
        return rank1.get("p/outcome", 0.1)

    following = at(hosts, 2, follow)
    outcome = agreement.propose(rank0, "p", b"the plan", [1], 1.0)
    assert (outcome.plan is None) == (moment == "before the vote")
    cut(hosts.cable)
    learned.set()
    with pytest.raises(DeviceLostError):
        following.result(LIMIT_S)
    mend(hosts.cable)
    # What `answer` does next where a store is there again: it aborts what nobody has decided.
    word = after.compare_set("p/outcome", b"", b"abort:rank 1 saw no decision in time")
    late = agreement._outcome(word, b"the plan")
    if kind is TorchStore:
        assert late == outcome
    else:
        assert late.plan is None and late.reason == "rank 1 saw no decision in time"


# -- rank groups ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["at any moment", "in a step"])
def test_a_rank_group_over_two_hosts_ends_at_a_cut_and_goes_on_under_the_next_epoch(
    hosts: Network, tmp_path: Path, moment: str
) -> None:
    """Sums over the cable, on hosts whose clocks differ: none is wrong, and no rank joins an epoch twice."""
    server, (host, port) = at(hosts, 1, lambda: open_store(ADDRESSES[1], LIMIT_S)).result(LIMIT_S)
    script = str(Path(__file__).with_name("spread.py"))
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    shape(hosts.cable, delay_s=0.001, towards=1)
    shape(hosts.cable, delay_s=0.003, towards=2)
    ranks = [
        Child(
            forked.PROGRAM, script, name, str(tmp_path), str(rank), host, str(port), moment,
            folder=tmp_path, variables=variables,
        )
        for rank, name in enumerate((hosts.first, hosts.second))
    ]  # fmt: skip
    try:
        wait_for(lambda: (tmp_path / "stepping").exists() or not all(r.is_alive() for r in ranks))
        cut(hosts.cable)
        (tmp_path / "cut").touch()
        ended = [tmp_path / f"ended-{rank}" for rank in range(2)]
        wait_for(lambda: all(e.exists() for e in ended) or not all(r.is_alive() for r in ranks))
        assert all(each.exists() for each in ended), [
            (each.out.read_text(), each.err.read_text()) for each in ranks
        ]
        mend(hosts.cable)
        (tmp_path / "mended").touch()
        printed = [each.ended() for each in ranks]
    finally:
        for each in ranks:
            each.process.kill()
    said = [[json.loads(line) for line in each.stdout.splitlines()] for each in printed]
    assert [len(each) for each in said] == [2, 3], printed
    (first0, second0), (first1, again, second1) = said
    assert first0["right"] >= 3 and first0["wrong"] == 0
    assert "DeviceLostError" in first0["error"] and "DeviceLostError" in first1["error"]
    assert "another process has joined as it" in again["again"]
    assert (second0["right"], second0["wrong"], second0["error"]) == (5, 0, "")
    assert second1["error"] == ""
    del server


# -- clocks ---------------------------------------------------------------------------------------------

# Who asks for the time of day, and why that is no other host's affair.
OF_ONE_HOST = {
    "actors/remote/ray_actor.py": "crashes of a device's own processes, in a file beside its journals",
    "layerzero/sharing/work.py": "the age of files in the cache folder",
}


def test_nothing_that_hosts_tell_each_other_is_a_time_of_day() -> None:
    """Leases, heartbeats, epochs, tokens and deadlines are durations, counts and names: clocks may differ."""
    asking = {
        str(path.relative_to(forked.ROOT))
        for folder in ("actors", "scheduler", "layerzero/sharing")
        for path in (forked.ROOT / folder).rglob("*.py")
        if re.search(r"\btime\.time(_ns)?\(|\b(datetime|date)\.(now|today|utcnow)\(", path.read_text())
    }
    assert asking == set(OF_ONE_HOST)


_OTHER_CLOCK = """
import sys
sys.argv = ["spread.py", "", ".", "1", "", "0"]
from layerzero.sharing.work import _boot
from tests.distributed import spread
before = _boot()
_boot.cache_clear()
spread.other_clocks()
print(before, _boot(), sep="\\n")
"""


def test_times_of_another_time_namespace_are_not_compared(laid: Network, tmp_path: Path) -> None:
    """A container of the same boot may count from another moment: what it kept is of another time."""
    before, after = Child(_OTHER_CLOCK, folder=tmp_path).ended().stdout.split("\n")[:2]
    assert before == work._boot() != after


# -- the generation server ------------------------------------------------------------------------------


def streamed(url: str, fields: dict[str, Any], timeout_s: float, begun: threading.Event | None = None) -> str:
    """The text of one streamed completion."""
    import httpx

    parts = []
    with (
        httpx.Client(base_url=url, timeout=timeout_s) as client,
        client.stream("POST", "/v1/completions", json=fields) as response,
    ):
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                parts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                if begun is not None:
                    begun.set()
    return "".join(parts)


@pytest.mark.slow
def test_a_server_on_another_host_gives_the_same_texts_and_keeps_nothing_of_who_is_cut_off(
    hosts: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients over a line that loses and delays; then one hears nothing more in the middle of its stream."""
    for package in (
        "httpx",
        "openai",
        "starlette",
        "uvicorn",
        "prometheus_client",
        "tokenizers",
        "safetensors",
    ):
        pytest.importorskip(
            package, reason=f"the server needs {package}: pip install 'layerzero-runtime[test]'"
        )
    monkeypatch.syspath_prepend(str(forked.ROOT / "examples"))
    from server import app as server_app

    from tests.examples.serving import NOTHING, asked, serving

    requests = [asked(seed=seed, max_tokens=20 + seed, stream=True) for seed in range(6)]
    with hosts.inside(2), serving(server_app.Options(pages=400, strict=True), ADDRESSES[2]) as running:

        def texts(number: int) -> list[str]:
            sent = [at(hosts, number, partial(streamed, running.url, fields, LIMIT_S)) for fields in requests]
            return [each.result(LIMIT_S) for each in sent]

        beside = texts(2)
        shape(hosts.cable, delay_s=0.002, loss=0.05, towards=1)
        shape(hosts.cable, delay_s=0.01, loss=0.05, towards=2)
        assert texts(1) == beside
        mend(hosts.cable)
        begun = threading.Event()
        lost = at(hosts, 1, partial(streamed, running.url, asked(max_tokens=400, stream=True), 2.0, begun))
        assert begun.wait(LIMIT_S)
        cut(hosts.cable, 1)
        with pytest.raises(Exception, match="timed out"):
            lost.result(LIMIT_S)
        mend(hosts.cable)
        assert running.settled(60.0) == NOTHING
        assert texts(1) == beside


# -- everything at once ---------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_call_runs_twice_over_links_that_lose_delay_and_are_cut(tmp_path: Path) -> None:
    """A cluster of two hosts: each link, cuts of each direction, short and long, a rank group through one."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'layerzero-runtime[ray]'")
    if why := why_not():
        pytest.skip(why)
    record = tmp_path / "record.json"
    command = [str(forked.ROOT / "benchmarks" / "hosts.py"), "--seconds", "2", "--json", str(record)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = json.loads(record.read_text())
    assert said["calls and streams that went wrong"] == 0
    assert said["clock of the second host ahead by s"] == 3600
    assert all(part["answered"] > 0 for part in (*said["links"].values(), *said["cuts"].values()))
    short = [part for name, part in said["cuts"].items() if name.endswith("1 s")]
    assert all(part["answered"] == part["calls"] for part in short)
    assert all(part["streams right"] > 0 for part in said["cuts"].values())
    long = [part for name, part in said["cuts"].items() if name.endswith("noticed")]
    assert all(part["noticed after s"] is not None for part in long)
    group = said["rank group over both hosts, 1 ms"]
    assert group["right after it"] is True and group["epoch"] == 2
