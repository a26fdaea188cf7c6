"""A pytest plugin: each check of a deployment's manifest as a test.

    pytest -p layerzero.cli.pytest_consistency --lz-deployment deployment.yaml --lz-cluster ADDRESS

A test asks for the fixture `lz_consistency`, the report of one comparison a session.
"""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from layerzero.cli.deployment import ConsistencyReport, check, load
from layerzero.spec.settings import Settings

CHECKS = (
    "devices", "versions", "kernels", "policy", "settings", "plans", "numerics", "batch order",
    "batched rows",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    """The deployment that is compared."""
    group = parser.getgroup("layerzero")
    group.addoption("--lz-deployment", default=None, help="The manifest of the deployment.")
    group.addoption("--lz-cluster", default=None, help="Its Ray cluster; this process alone if left out.")


def _report_of(config: pytest.Config) -> ConsistencyReport:
    settings = Settings.load(cluster=config.getoption("--lz-cluster"))
    return anyio.run(check, load(str(config.getoption("--lz-deployment"))), settings)


@pytest.fixture(scope="session")
def lz_consistency(request: pytest.FixtureRequest) -> ConsistencyReport:
    """The report of comparing all devices; skipped where no manifest was given."""
    path: Any = request.config.getoption("--lz-deployment")
    if path is None:
        pytest.skip("no --lz-deployment was given")
    return _report_of(request.config)


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add one test a check, where a manifest was given."""
    if config.getoption("--lz-deployment") is not None:
        for what in CHECKS:
            items.append(_ConsistencyItem.from_parent(session, name=f"layerzero[{what}]", what=what))


_REPORT = pytest.StashKey[ConsistencyReport]()


class _ConsistencyItem(pytest.Item):
    def __init__(self, *, what: str, **more: Any) -> None:
        super().__init__(**more)
        self._what = what

    def runtest(self) -> None:
        stash = self.session.stash
        if _REPORT not in stash:
            stash[_REPORT] = _report_of(self.config)
        disagreeing = [f for f in stash[_REPORT].findings if f.check == self._what]
        if disagreeing:
            raise AssertionError("\n".join(f"{f.about}: {f.values}; {f.advice}" for f in disagreeing))

    def repr_failure(self, excinfo: Any, style: Any = None) -> str:
        return str(excinfo.value)  # without this module's frames

    def reportinfo(self) -> tuple[str, int | None, str]:
        return str(self.config.getoption("--lz-deployment")), None, self.name
