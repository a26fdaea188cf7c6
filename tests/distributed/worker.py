"""What Ray starts as a worker of the tests' nodes: it has a fork that finds torch imported be that."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

SOCKET = "LZ_TEST_FORKS"
# With what ray imports, but not ray: it reads its environment once, and a worker has one of its own.
MODULES = ("torch", "asyncio", "psutil", "jsonschema", "requests", "yaml", "filelock", "msgpack")


def main() -> None:
    """Ask the server of forks, by its socket's path in the environment, and leave."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.forks import ask

    spec = importlib.util.find_spec("ray")
    assert spec is not None and spec.origin is not None
    program = Path(spec.origin).parent / "_private" / "workers" / "default_worker.py"
    ask(os.environ[SOCKET], [str(program), *sys.argv[1:]], os.environ, {0: 0, 1: 1, 2: 2})


if __name__ == "__main__":
    main()
