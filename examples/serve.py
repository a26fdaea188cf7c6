"""A generation server: every request is one coroutine, and requests meet in batches.

    python examples/serve.py [--model FOLDER] [--device cpu|cuda] [--per op|layer|step] [--port N]
        [--bundle FILE [--bundle-sha256 HEX]]

It speaks the API of OpenAI's clients: /v1/completions and /v1/chat/completions, streamed or not, and
/v1/models, beside /health, /ready and /metrics. A client that goes away takes its request with it; a full
server answers 429 with Retry-After; SIGTERM ends what has begun and takes nothing new.
`server/` has its parts: the fields of a request, the loop of one request, the answers, the application.
"""

from __future__ import annotations

import sys

from server.app import main

if __name__ == "__main__":
    sys.exit(main())
