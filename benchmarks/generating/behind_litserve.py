"""The same forward behind LitServe: batches of whole requests, one worker."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

import litserve  # noqa: E402

MOST, WAIT_S = 64, 0.01


class Completions(litserve.LitAPI):
    """One worker: requests that come within `WAIT_S` of the first run as one batch."""

    def setup(self, device: str) -> None:
        """Load the model in the worker's process."""
        import torch
        from models import llama

        import layerzero as lz

        pages, threads = (int(word) for word in sys.argv[2:4])
        torch.set_num_threads(threads)
        lz.start(lz.Settings(device="cpu", inference=True, warm="eager")).__enter__()
        self.model = llama.load(pages=pages)

    def predict(self, x: Any, **_: Any) -> Any:
        """All requests of a batch; a single one comes without a list."""
        from generating.together import complete

        return complete(self.model, x) if isinstance(x, list) else complete(self.model, [x])[0]


def main() -> None:
    """Serve on the port that the command line names until SIGTERM."""
    api = Completions(max_batch_size=MOST, batch_timeout=WAIT_S, api_path="/v1/completions")
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="error")


if __name__ == "__main__":
    main()
