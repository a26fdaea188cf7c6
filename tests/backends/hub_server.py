"""A server that speaks the hub's protocol, as far as `kernels` asks: trees, revisions, files by commit."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


class HubServer(ThreadingHTTPServer):
    """Serves `folder/<owner>/<name>` at any commit; `asked` are the paths, `extra` is listed, too."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.asked: list[str] = []
        self.extra: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: HubServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(path)
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "kernels"]:
            repository, kind, commit = "/".join(parts[2:4]), parts[4], parts[5]
            root = self.server.folder / repository
            if not root.exists():
                return self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
            files = sorted(p for p in root.rglob("*") if p.is_file())
            if kind == "tree":
                self._json(self._tree(root, "/".join(parts[6:])) + self.server.extra)
            elif kind == "revision":
                siblings = [{"rfilename": p.relative_to(root).as_posix()} for p in files]
                siblings += [{"rfilename": entry["path"]} for entry in self.server.extra]
                self._json({"id": repository, "sha": commit, "siblings": siblings, "tags": [], "downloads": 0,
                            "likes": 0, "private": False})  # fmt: skip
            else:
                self._answer(404, b"")
        elif parts[0] == "kernels" and parts[3] == "resolve":
            file = self.server.folder / parts[1] / parts[2] / "/".join(parts[5:])
            if file.is_file():
                content = file.read_bytes()
                etag = hashlib.sha256(content).hexdigest()
                self._answer(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": parts[4]})
            else:
                self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        else:
            self._answer(404, b"")

    def _tree(self, root: Path, below: str) -> list[dict[str, Any]]:
        recursive = "recursive=true" in self.path.lower()
        paths = (root / below).rglob("*") if recursive else (root / below).iterdir()
        entries = []
        for path in sorted(paths):
            entry = {
                "path": path.relative_to(root).as_posix(),
                "oid": "0" * 40,
                "size": 0,
                "type": "directory",
            }
            if path.is_file():
                entry |= {"type": "file", "size": path.stat().st_size}
            entries.append(entry)
        return entries

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on the test's output."""


@contextmanager
def serving(folder: Path) -> Iterator[HubServer]:
    """A server of a folder's repositories while the block runs."""
    server = HubServer(folder)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
