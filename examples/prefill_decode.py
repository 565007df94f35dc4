"""Prefill in one server, decode in another, and a client that sends a prompt to the one and then to the other."""

import json
import subprocess
import sys
import time
import urllib.request

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
OPTIONS = ["--max-num-seqs", "2", "--max-model-len", "512", "--max-num-batched-tokens", "256"]


def serve(port: int, role: str) -> subprocess.Popen[bytes]:
    transfer = {"kv_connector": "TcpConnector", "kv_role": role, "kv_port": 8300}
    words = ["serve", MODEL, "--port", str(port), *OPTIONS, "--kv-transfer-config", json.dumps(transfer)]
    return subprocess.Popen([sys.executable, "-m", "ostinato.cli", *words])


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return str(answer.read().decode())


def complete(port: int, **body: object) -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=600) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def wait_until_ready(port: int) -> None:
    for _ in range(600):
        try:
            get(port, "/health")
            return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"the server at port {port} did not come up")


servers = [serve(8100, "kv_producer"), serve(8200, "kv_consumer")]
try:
    for port in (8100, 8200):
        wait_until_ready(port)
    body = {"prompt": "The quick brown fox jumps over the lazy dog. " * 20 + "The", "temperature": 0}
    complete(8100, **body, max_tokens=1)
    print(complete(8200, **body, max_tokens=16))
    print(*(line for line in get(8200, "/metrics").splitlines() if line.startswith("ostinato:external")), sep="\n")
finally:
    for server in servers:
        server.terminate()
    for server in servers:
        server.wait()
