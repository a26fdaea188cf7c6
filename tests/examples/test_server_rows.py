"""How many rows a step of the generation server has; no other server is in the process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.waiting import LIMIT_S

for package in ("starlette", "uvicorn", "prometheus_client", "tokenizers", "safetensors"):
    pytest.importorskip(package, reason=f"the server needs {package}: pip install 'layerzero-runtime[test]'")

from server import app as server_app  # noqa: E402  the skips come first

from tests.examples import loopback  # noqa: E402
from tests.examples.serving import asked, serving  # noqa: E402


@pytest.mark.parametrize(("rows", "pieces"), [(5, [5, 5, 2]), (1024, [12])])
def test_a_step_has_as_many_rows_as_the_command_says(
    monkeypatch: pytest.MonkeyPatch, rows: int, pieces: list[int]
) -> None:
    """Also fewer than a piece of a prompt; the variable of the setting does not change it."""
    monkeypatch.setenv("LAYERZERO_MAX_NUM_BATCHED_TOKENS", "7")
    with serving(server_app.parse(["--max-num-batched-tokens", str(rows)])) as server:
        counts: list[int] = []
        model = type(server.service.model)
        sample_next = model.sample_next

        def counted(self: Any, ids: Any, *rest: Any) -> Any:
            counts.append(len(ids))
            return sample_next(self, ids, *rest)

        monkeypatch.setattr(model, "sample_next", counted)
        fields = asked(prompt=list(range(1, 13)), max_tokens=1)
        assert loopback.post(f"{server.url}/v1/completions", json=fields, timeout=LIMIT_S).status_code == 200
        assert counts == pieces
        assert server.device().settings.max_num_batched_tokens == rows
