"""A real server over a tiny model, on an event loop of its own thread; or in a process of its own."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import uvicorn

from ostinato import LLM
from ostinato.engine.async_engine import AsyncEngine
from ostinato.server.app import create_app

T = TypeVar("T")

SRC = Path(__file__).parents[2] / "src"
ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {
    "max_model_len": 192,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 64,
}
"""Engine options of most tests: 8 rows, 63 blocks of 16 tokens."""


@dataclass(slots=True)
class Running:
    """A server that runs. `url` has no slash at its end."""

    url: str
    engine: AsyncEngine
    loop: asyncio.AbstractEventLoop

    def on_loop(self, make: Callable[[], Awaitable[T]]) -> T:
        """The result of a coroutine that is made and run on the server's loop."""

        async def run() -> T:
            return await make()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(60)

    def between_steps(self, function: Callable[[LLM], T]) -> T:
        return self.on_loop(lambda: self.engine.call(function))

    def client(self, **options: Any) -> openai.OpenAI:
        settings = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 60} | options
        return openai.OpenAI(**settings)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=60, **options)

    def wait_idle(self, timeout_s: float = 20) -> None:
        """Until no request is open and no step in flight."""
        deadline = time.monotonic() + timeout_s
        while self.engine.num_open or self.between_steps(lambda llm: llm.engine.has_unfinished):
            assert time.monotonic() < deadline, f"{self.engine.num_open} requests are still open"
            time.sleep(0.01)

    def assert_nothing_leaked(self, num_tasks: int) -> None:
        """Every block and row is free, nothing is remembered about any request, no task is left."""
        self.wait_idle()

        def check(llm: LLM) -> tuple[int, int, int, int]:
            scheduler = llm.engine.scheduler
            scheduler.check_integrity()
            return scheduler.kv.num_free, len(scheduler._free_slots), len(llm.engine._outputs), scheduler.num_waiting

        stats = self.engine.info.stats
        assert self.between_steps(check) == (stats.num_blocks - 1, stats.max_num_seqs, 0, 0)
        assert not self.engine._members
        assert not self.engine._calls
        deadline = time.monotonic() + 10
        while (left := self.num_tasks()) > num_tasks and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left <= num_tasks, f"{left} tasks, {num_tasks} before"

    def num_tasks(self) -> int:
        async def count() -> int:
            return len(asyncio.all_tasks()) - 1

        return self.on_loop(count)


@contextmanager
def running(
    open_llm: Callable[[], LLM],
    *,
    max_queue: int = 1024,
    wait: bool = True,
    **app_options: Any,
) -> Iterator[Running]:
    """`wait=False` yields while the engine is still starting."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        settings: dict[str, Any] = {"model_names": ["tiny"]} | app_options
        made: list[Running] = []
        started = threading.Event()

        async def serve() -> None:
            engine = AsyncEngine(open_llm, max_queue=max_queue)
            app = create_app(engine, **settings)
            server = uvicorn.Server(
                uvicorn.Config(app, http="httptools", ws="none", lifespan="off", log_level="warning", access_log=False)
            )
            engine.start()
            serving = asyncio.create_task(server.serve([sock]))
            if wait:
                await engine.ready()
            made.append(Running(url, engine, asyncio.get_running_loop()))
            started.set()
            while not stop.is_set():
                await asyncio.sleep(0.02)
            server.should_exit = server.force_exit = True
            await serving
            await engine.close()

        stop = threading.Event()
        failures: list[BaseException] = []

        def run() -> None:
            try:
                asyncio.run(serve())
            except BaseException as error:
                failures.append(error)
            finally:
                started.set()

        thread = threading.Thread(target=run, name="test-server")
        thread.start()
        started.wait(60)
        try:
            if made:
                yield made[0]
        finally:
            stop.set()
            thread.join(30)
        assert not thread.is_alive()
        if failures:
            raise failures[0]


@dataclass(slots=True)
class ServerProcess:
    process: subprocess.Popen[str]
    url: str
    lines: list[str]

    def wait_ready(self, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while httpx.get(f"{self.url}/health", timeout=10).status_code != 200:
            assert self.process.poll() is None, self.lines
            assert time.monotonic() < deadline
            time.sleep(0.05)

    @property
    def log(self) -> str:
        return "".join(self.lines)


@contextmanager
def server_process(words: Sequence[str]) -> Iterator[ServerProcess]:
    """`python ...` that logs where it listens, as `ostinato serve` does. Killed at the end if it still runs."""
    environment = os.environ | {"PYTHONPATH": f"{SRC}:{ROOT}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, *words], env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: list[str] = []
    server = ServerProcess(process, "", lines)
    listening = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"listening on (http://\S+?),", line):
                server.url = found[1]
                listening.set()
        listening.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert listening.wait(60), lines
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)
        reader.join(30)
