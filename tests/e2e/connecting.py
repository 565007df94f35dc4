"""Engines with connectors, here and in processes of their own."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ostinato import LLM
from ostinato.connectors.protocol import ConnectorStats

from .driving import greedy

FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["tests.e2e.connecting", "ostinato.engine.llm", "ostinato.connectors.staged_worker"])


def open_llm(path: Path, transfer: dict[str, Any] | None, **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 16,
        "cudagraph_capture_sizes": [1, 2, 4, 64],
        "kv_transfer_config": transfer,
        **options,
    }
    return LLM(str(path), **settings)


def disk(folder: Path, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    options = {"path": str(folder), "cpu_bytes_to_use": 1 << 22, **extra}
    return {"kv_connector": "DiskConnector", "kv_role": role, "kv_connector_extra_config": options}


def tcp(port: int, role: str, **extra: Any) -> dict[str, Any]:
    options = {"cpu_bytes_to_use": 1 << 22, **extra}
    return {
        "kv_connector": "TcpConnector",
        "kv_role": role,
        "kv_port": port,
        "kv_connector_extra_config": options,
    }


def stats_of(llm: LLM) -> ConnectorStats:
    stats = llm.stats().connector
    assert stats is not None
    return stats


def tokens_of(llm: LLM, prompt: list[int], num_tokens: int = 5) -> list[int]:
    return list(llm.generate(prompt, greedy(num_tokens))[0].outputs[0].token_ids)


def until(there: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not there():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def start(target: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection[Any, Any]]:
    """`target(pipe, *arguments)` in a process of its own that has imported what engines need."""
    here, there = FORKS.Pipe()
    process = FORKS.Process(target=target, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    return process, here


def serve_blocks(pipe: Connection[Any, Any], path: Path, port: int, die_at: int | None, transport: str) -> None:
    """A producer. Answers prompts with one token; is killed when it is asked for its block number `die_at`."""
    llm = open_llm(path, tcp(port, "kv_producer", transport=transport))
    if die_at is not None:
        server = llm._built.connector.scheduler._close.__self__.server  # type: ignore[union-attr]
        get, num_asked = server._get, 0

        def get_or_die(digest: bytes) -> memoryview | None:
            nonlocal num_asked
            num_asked += 1
            if num_asked == die_at:
                os.kill(os.getpid(), 9)
            return get(digest)

        server._get = get_or_die
    pipe.send("ready")
    while (prompt := pipe.recv()) is not None:
        pipe.send(tokens_of(llm, prompt, 1))
    pipe.send(stats_of(llm))
    llm.close()


def write_blocks(pipe: Connection[Any, Any], path: Path, folder: Path, prompts: list[list[int]], seed: int) -> None:
    """An engine that answers prompts in turn until it is killed, over a pool and a folder that hold a part of them."""
    llm = open_llm(path, disk(folder, max_bytes=MAX_BYTES, cpu_bytes_to_use=1 << 19))
    number = seed
    while True:
        index = number * 7 % len(prompts)
        pipe.send((index, tokens_of(llm, prompts[index], 3), stats_of(llm).hit_tokens))
        number += 1


MAX_BYTES = 400_000
"""Of the folder that `write_blocks` shares: too little for all."""
