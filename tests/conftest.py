"""What every test shares: hypothesis profiles, detectors of blocking calls and of circles among locks."""

# ruff: noqa: E402  (locks are watched before the library is imported)

import gc
import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from blockbuster import BlockBuster
from hypothesis import HealthCheck, Phase, settings

from tests import lock_order

lock_order.watch()  # before the library makes its first lock

from layerzero.native import FAST_PATH
from layerzero.native.compiling import cache_folder
from layerzero.spec.errors import BackendNotAvailableError
from tests.precision import need_full_float32

# No deadlines: they would time a shared machine, not the code.  The CI profile is derandomised so that a red
# build is a change in the code; the default one looks somewhere new on every run.
# The stress suite looks longer.
_SLOW_IS_FINE = [HealthCheck.too_slow]
_EXAMPLES = 150 if os.environ.get("LZ_STRESS") == "1" else 50
settings.register_profile(
    "default", max_examples=_EXAMPLES, derandomize=False, deadline=None, suppress_health_check=_SLOW_IS_FINE
)
settings.register_profile(
    "ci",
    max_examples=_EXAMPLES,
    derandomize=True,
    deadline=None,
    suppress_health_check=_SLOW_IS_FINE,
    print_blob=True,
)
# What a mutation needs to be red, not small: the same examples every time, and none made smaller.
settings.register_profile(
    "mutation",
    max_examples=50,
    derandomize=True,
    deadline=None,
    suppress_health_check=_SLOW_IS_FINE,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Neither what this machine measured before nor what we ship may decide a test's choices; those that test
# measurements say so themselves.
os.environ.setdefault("LAYERZERO_PERFDB", "none")
os.environ.setdefault("LAYERZERO_SHIPPED_TABLES", "false")

torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))  # and in every child

# What most installations run: the awaited path's compiled twin (compiled once, on a machine's first run).
# `tests/native/twins.py` runs what concerns it in Python alone as well.
try:
    FAST_PATH.load()
except BackendNotAvailableError as error:
    print(f"the tests run without the compiled twin: {error}")

# Settings that a test writes out ask for the user's own measurements: here the user has none. What was
# compiled stays where it is, since compiling it anew takes longer than most tests.
CACHE = tempfile.TemporaryDirectory(prefix="layerzero-tests-")
(Path(CACHE.name) / "layerzero").mkdir()
with suppress(BackendNotAvailableError):  # nowhere to keep what is compiled: the twin said so above
    (Path(CACHE.name) / "layerzero" / "native").symlink_to(cache_folder())
os.environ["XDG_CACHE_HOME"] = CACHE.name

SLOW = "a further case of what other tests hold: `pytest --slow` and `make stress` run it"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--slow` runs what is marked slow as well."""
    parser.addoption("--slow", action="store_true", help="run the tests that are marked slow, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what takes longest, so that no worker ends alone with it; leave out what is slow."""
    # Under a mutation a proof runs whole: any of its cases may be the one that notices.
    whole = os.environ.get("LZ_STRESS") == "1" or os.environ.get("HYPOTHESIS_PROFILE") == "mutation"
    if not whole and not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow") is not None:
                item.add_marker(pytest.mark.skip(reason=SLOW))
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the tests without the collector: what they make lives as long as the process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Put the libraries and the tests themselves out of the collector's way: many tests ask it to run."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the interpreter's end collect everything, as libraries expect that count what they leave."""
    gc.unfreeze()


# A first use opens its device, imports its op and reads how much memory is free, on the thread that asks;
# closing joins threads. Such calls are short or at the ends; `tests/scheduler`, which does neither, sees all.
AT_FIRST_USE = (
    "threading.Lock", "os.access", "os.getcwd", "os.listdir", "os.path", "os.readlink", "os.scandir",
    "os.stat", "io.",
)  # fmt: skip
# Here the tests themselves block their loop: they load models, or look into files and processes; Ray's client
# does now and then, and a side channel makes and removes its socket's folder once in a device's life.
BY_HAND = (
    "tests/cuda/", "tests/distributed/", "tests/examples/", "tests/perfdb/", "tests/warmup/",
    "tests/actors/rpc/test_channel.py", "tests/benchmarks/test_embedding_load.py",
)  # fmt: skip


def _detector() -> BlockBuster:
    detector = BlockBuster()
    for name in [name for name in detector.functions if name.startswith(AT_FIRST_USE)]:
        del detector.functions[name]
    return detector


# One for all tests: looking all functions up again for each is work that changes nothing.
BLOCKING = _detector()


@pytest.fixture(autouse=True)
def full_float32() -> Iterator[None]:
    """Every number is compared in full float32; a test that lets TF32 in puts it back or fails."""
    need_full_float32()
    yield
    need_full_float32()


@pytest.fixture(autouse=True)
def locks_have_an_order() -> Iterator[None]:
    """Fail the test that takes two locks of the library in both orders, or closes a longer circle."""
    yield
    circle = lock_order.ORDER.circle()
    assert not circle, lock_order.ORDER.told(circle)


@pytest.fixture(autouse=True)
def no_blocking_calls(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test whose event loop's thread sleeps, waits for a process or a socket, or changes files."""
    if request.path.relative_to(request.config.rootpath).as_posix().startswith(BY_HAND):
        yield
        return
    BLOCKING.activate()
    yield
    BLOCKING.deactivate()
