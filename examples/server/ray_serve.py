"""The generation server under Ray Serve: each of its replicas is a whole server on a GPU of its own.

    serve run server.ray_serve:app model=FOLDER device=cuda replicas=2     # in examples/, extra ray-serve

Ray Serve spreads requests, restarts replicas and scales them; what a request meets inside one is the same as
under uvicorn. With `--cluster` in place of it the server's own front spreads them, by what each replica has
computed, and continues the streams of one that is lost (`fleet.py`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ray import serve

HERE = Path(__file__).resolve().parents[1]


def deployment(replicas: int = 1, **fields: Any) -> Any:
    """So many replicas of the server; on CUDA each has a GPU."""
    from server.app import WAITING, Options

    # HTTP is in a process of its own already: the proxy of Ray Serve.
    options = Options(**{"engine_process": False, **fields})

    def build() -> Any:  # in the process of each replica
        from server import app as server_app

        return server_app.application(options)

    return serve.deployment(
        serve.ingress(build)(),
        name="generation",
        num_replicas=replicas,
        max_ongoing_requests=options.max_requests + WAITING,
        graceful_shutdown_timeout_s=float(options.drain_s),
        ray_actor_options={
            "num_cpus": 1,
            "num_gpus": 1 if options.device == "cuda" else 0,
            "runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}},
        },
    ).bind()


def app(args: dict[str, str]) -> Any:
    """What `serve run server.ray_serve:app NAME=VALUE...` runs."""
    named: dict[str, Any] = {name: int(value) if value.isdigit() else value for name, value in args.items()}
    if "model" in named:
        named["model"] = Path(named["model"])
    return deployment(**named)
