"""The command, run in this process."""

import pytest
from click.testing import CliRunner, Result

from layerzero.cli import main
from tests.cli.command import Lz


@pytest.fixture
def lz() -> Lz:
    """Run `lz` with these words; an exception that is no exit is raised here."""

    def run(*words: str) -> Result:
        return CliRunner().invoke(main, list(words), catch_exceptions=False)

    return run
