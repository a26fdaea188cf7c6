"""The generation server with a warm-up bundle, and the moment from which it serves."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
for package in ("openai", "starlette", "uvicorn", "prometheus_client", "tokenizers", "safetensors"):
    pytest.importorskip(package, reason=f"the server needs {package}: pip install 'layerzero-runtime[test]'")
if str(ROOT / "examples") not in sys.path:
    sys.path.insert(0, str(ROOT / "examples"))

from server import app as server_app  # noqa: E402
from server.service import Service  # noqa: E402

import layerzero as lz  # noqa: E402
from layerzero.measure.calls import call, tensor  # noqa: E402
from tests.examples import loopback  # noqa: E402
from tests.examples.serving import asked, serving  # noqa: E402


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """A bundle of this machine, and its digest."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LAYERZERO_NATIVE", "off")  # compiling our own C++ is no affair of these tests
    monkeypatch.setenv("LAYERZERO_DENY", "native.*")
    with lz.start(lz.Settings(device="cpu", warm="off"), scoped=True):
        manifest = lz.Manifest(critical=(call("layer_norm", x=tensor(3, 8, dtype="float32")),))
        return tmp_path / "warm.lzb", lz.save_bundle(tmp_path / "warm.lzb", manifest).sha256


def test_a_server_takes_a_bundle_and_says_so(bundle: tuple[Path, str]) -> None:
    """It is loaded before the model, its calls are warmed, and health names it."""
    path, digest = bundle
    with serving(server_app.Options(pages=64, bundle=path, bundle_sha256=digest)) as server:
        assert loopback.get(f"{server.url}/health").json()["bundle"] == digest
        assert server.inside(lambda: lz.readiness_check().bundles) == (digest,)
        answer = loopback.post(f"{server.url}/v1/completions", json=asked(max_tokens=3), timeout=60)
        assert answer.status_code == 200


def test_a_server_does_not_start_with_a_bundle_that_is_refused(bundle: tuple[Path, str]) -> None:
    """Another file than the pinned one: the operator sees it at once, not in production."""
    path, _ = bundle
    app = server_app.application(server_app.Options(pages=64, bundle=path, bundle_sha256="0" * 64))

    async def start() -> None:
        async with app.router.lifespan_context(app):
            raise AssertionError("it serves")

    with pytest.raises(lz.BundleRefusedError, match="BUNDLE_UNTRUSTED"):
        asyncio.run(start())


def test_the_digest_needs_its_bundle(capsys: pytest.CaptureFixture[str]) -> None:
    """The command line says which option is missing."""
    with pytest.raises(SystemExit):
        server_app.parse(["--bundle-sha256", "0" * 64])
    assert "--bundle-sha256 needs --bundle" in capsys.readouterr().err
    assert server_app.parse(["--bundle", "b.lzb"]).bundle == Path("b.lzb")


class Runner:
    """Captures by name alone."""

    buckets, prefill_buckets = (1, 2, 4), (8, 16)

    def __init__(self) -> None:
        self.captured: list[int] = []

    def capture(self, *, buckets: list[int], prefill_buckets: list[int]) -> None:
        """Note the buckets."""
        self.captured += [*buckets, *prefill_buckets]


def test_it_serves_before_its_steps_are_captured_where_a_compiler_is_at_work() -> None:
    """Steps are captured ahead, the largest first, those of prompts last, until a compiler is at work."""
    runners = [Runner(), Runner()]
    at_work = iter([False, False, True, *[False] * 10])

    class Loader:
        @property
        def compiling(self) -> bool:
            return next(at_work)

    loader = Loader()
    service: Any = SimpleNamespace(
        model=SimpleNamespace(runners=runners), options=server_app.Options(device="cuda")
    )
    Service._capture(service, SimpleNamespace(device=lambda name: SimpleNamespace(loader=loader)))  # type: ignore[arg-type]
    assert [runner.captured for runner in runners] == [[4, 2], []]
    Service._capture(service, SimpleNamespace(device=lambda name: SimpleNamespace(loader=loader)))  # type: ignore[arg-type]
    assert [runner.captured for runner in runners] == [[4, 2, 4, 2, 1, 16, 8], [4, 2, 1, 16, 8]]
