"""What the page talks to, without an engine: the files of the page, a scripted engine, answers that a test lets go."""

from __future__ import annotations

import json
import mimetypes
import select
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from .running import LONGEST_S

STATIC = Path(__file__).parents[2] / "src" / "ostinato" / "server" / "static"
BUCKETS, MIXED = (1, 2, 4, 8), (8, 16, 32)


class MockServer:
    """On a thread of its own. `release(n)` lets the open answers go on by n tokens together, of `words` in turn."""

    def __init__(self, words: list[str], key: str | None = None) -> None:
        self.words, self.key = words, key
        self.changed = threading.Condition()
        self.permits = 0
        self.steps: list[dict[str, Any]] = []
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.open = self.left = 0
        """Answers that stream, and those whose reader went away."""
        self._server: ThreadingHTTPServer | None = None
        # bound and never listening: nobody else gets the port while the server is stopped
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self._port: int = self._reserved.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/"

    def start(self) -> None:
        """At the same port as before, if it was stopped."""
        self._server = _Server(("127.0.0.1", self._port), _handler_of(self))
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def close(self) -> None:
        self.stop()
        self._reserved.close()

    def wait_open(self, answers: int) -> None:
        """Until so many stream."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.open == answers, LONGEST_S), f"{self.open} answers are open"

    def release(self, tokens: int) -> None:
        with self.changed:
            self.permits += tokens
            self.changed.notify_all()

    def add_step(self, mode: str, key: list[int | None] | None, reason: str, rows: int, tokens: int) -> None:
        now = time.time() * 1e3
        padded = tokens if key is None else key[0]
        with self.changed:
            self.steps.append(
                {
                    "id": len(self.steps) + 1,
                    "launched_ms": now - 5,
                    "collected_ms": now,
                    "mode": mode,
                    "key": key,
                    "reason": reason,
                    "rows": rows,
                    "tokens": tokens,
                    "padded_tokens": padded,
                }
            )

    def decode_step(self, rows: int) -> None:
        bucket = next(size for size in BUCKETS if size >= rows)
        self.add_step("FULL", [bucket, bucket, 1], "exact" if bucket == rows else "padded", rows, rows)

    # -- what the page asks for ----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        counters: dict[str, dict[str, Any]] = {}
        for step in list(self.steps):
            name = json.dumps([step["mode"], step["key"], step["reason"]])
            row = {"mode": step["mode"], "key": step["key"], "reason": step["reason"]}
            counter = counters.setdefault(name, row | {"count": 0, "live_tokens": 0, "padded_tokens": 0})
            counter["count"] += 1
            counter["live_tokens"] += step["tokens"]
            counter["padded_tokens"] += step["padded_tokens"]
        sizes = [("FULL", size, size, 1) for size in BUCKETS] + [("PIECEWISE", size, 8, None) for size in MIXED]
        names = ("mode", "num_tokens", "num_rows", "query_len")
        made = {"num_graphs": 1, "num_nodes": 30, "seconds": 0.05, "bytes": 1 << 20}
        return {
            "model": "mock",
            "mode": "FULL_AND_PIECEWISE",
            "backend": "cuda",
            "device": "cuda",
            "dtype": "bfloat16",
            "block_size": 16,
            "num_blocks": 200,
            "max_model_len": 4096,
            "ladder": {"uniform": BUCKETS, "mixed": MIXED},
            "recordings": [dict(zip(names, size, strict=True)) | made for size in sizes],
            "counters": list(counters.values()),
            "memory": {
                "before": 1 << 28,
                "weights": 1 << 30,
                "kv": 3 << 30,
                "graphs": 7 << 20,
                "buffers": 9 << 20,
                "libraries": 0,
                "free": 1 << 29,
                "total": 5 << 30,
            },
        }

    def get(self, path: str, after: int) -> Any:
        if path == "/graphs/state":
            return self.state()
        if path == "/graphs/steps":
            steps = list(self.steps)
            return {"last": len(steps), "steps": steps[after:][-512:]}
        count = self.open
        if path == "/graphs/pool":
            return {"num_blocks": 200, "states": "s" + "u" * (3 * count) + "c" * 7 + "f" * (192 - 3 * count)}
        requests = [{"id": f"r{n}", "status": "running", "prompt_tokens": 40, "output_tokens": 1} for n in range(count)]
        return [request | {"blocks": [3 * n + 1, 3 * n + 2, 3 * n + 3]} for n, request in enumerate(requests)]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a browser that closes a connection is no news


def _handler_of(mock: MockServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # one answer a connection, which its end ends

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            mock.paths.append(parts.path)
            if parts.path.startswith("/graphs/"):
                if self._may():
                    after = int(parse_qs(parts.query).get("after", ["0"])[0])
                    self._reply(200, "application/json", json.dumps(mock.get(parts.path, after)).encode())
                return
            file = STATIC / "index.html" if parts.path == "/" else STATIC / parts.path.removeprefix("/static/")
            if file.is_file():
                self._reply(200, mimetypes.guess_type(file.name)[0] or "text/plain", file.read_bytes())
            else:
                self._reply(404, "text/plain", b"")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self._may():
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            with mock.changed:
                mock.bodies.append(body)
                start = mock.permits
                mock.open += body.get("n", 1)
                mock.changed.notify_all()
            try:
                self._stream(body.get("n", 1), start)
            except (OSError, ConnectionError):
                with mock.changed:
                    mock.left += 1
            finally:
                with mock.changed:
                    mock.open -= body.get("n", 1)
                    mock.changed.notify_all()

        def _stream(self, answers: int, start: int) -> None:
            mock.add_step("PIECEWISE", [32, 8, None], "mixed batch: piecewise", 1, 20)
            for index in range(answers):
                self._say(index, {"role": "assistant", "content": ""})
            for number, word in enumerate(mock.words, start=1):
                with mock.changed:
                    while mock.permits - start < number:
                        mock.changed.wait(0.02)
                        self._require_reader()
                    mock.decode_step(mock.open)
                for index in range(answers):
                    self._say(index, {"content": word}, "stop" if number == len(mock.words) else None)
            usage = {"prompt_tokens": 20, "completion_tokens": answers * len(mock.words)}
            self._write(json.dumps({"choices": [], "usage": usage}))
            self._write("[DONE]")

        def _say(self, index: int, delta: dict[str, str], finish: str | None = None) -> None:
            self._write(json.dumps({"choices": [{"index": index, "delta": delta, "finish_reason": finish}]}))

        def _write(self, data: str) -> None:
            self.wfile.write(f"data: {data}\n\n".encode())
            self.wfile.flush()

        def _require_reader(self) -> None:
            readable, _, _ = select.select([self.connection], [], [], 0)
            if readable and self.connection.recv(1, socket.MSG_PEEK) == b"":
                raise ConnectionError("the reader went away")

        def _may(self) -> bool:
            if mock.key is None or self.headers.get("Authorization") == f"Bearer {mock.key}":
                return True
            self._reply(401, "application/json", b'{"error": {"message": "the key is missing"}}')
            return False

        def _reply(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler
