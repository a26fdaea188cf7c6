"""The generation server under strict determinism: texts do not depend on company, bit by bit."""

from __future__ import annotations

import pytest

for package in ("openai", "starlette", "uvicorn", "prometheus_client", "tokenizers", "safetensors"):
    pytest.importorskip(package, reason=f"the server needs {package}: pip install 'layerzero-runtime[test]'")

from models.llama import Per  # noqa: E402  the skips come first
from server import app as server_app  # noqa: E402

from tests.examples.serving import check_texts_in_company, serving  # noqa: E402


@pytest.mark.long
@pytest.mark.asyncio
@pytest.mark.parametrize(
    "per", ["op", *(pytest.param(per, marks=pytest.mark.slow) for per in ("layer", "step"))]
)
async def test_sixty_four_streams_keep_their_texts(per: Per) -> None:
    """A seed gives the same text alone and among sixty-four, on kernels whose rows ignore their batch."""
    with serving(server_app.Options(pages=512, strict=True, per=per)) as strict:
        await check_texts_in_company(strict, 64, 12)
