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
from ostinato.engine.output import Delta
from ostinato.server.app import create_app

T = TypeVar("T")

SRC = Path(__file__).parents[2] / "src"
ROOT = Path(__file__).parents[2]
LONGEST_S = 90
"""What a test waits at most for something that takes no time on a machine with nothing else to do."""
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

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(LONGEST_S)

    def between_steps(self, function: Callable[[LLM], T]) -> T:
        return self.on_loop(lambda: self.engine.call(function))

    def client(self, **options: Any) -> openai.OpenAI:
        settings = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": LONGEST_S} | options
        return openai.OpenAI(**settings)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=LONGEST_S, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=LONGEST_S, **options)

    @contextmanager
    def slow_steps(self, seconds: float) -> Iterator[None]:
        """So that an answer lasts until a test has looked at it, on any machine."""

        def slow_down(llm: LLM) -> None:
            step = llm.engine.step

            def slow_step() -> list[Delta]:
                time.sleep(seconds)
                return step()

            llm.engine.step = slow_step  # type: ignore[method-assign]

        self.between_steps(slow_down)
        try:
            yield
        finally:
            self.between_steps(lambda llm: llm.engine.__dict__.pop("step"))

    def wait_idle(self, timeout_s: float = LONGEST_S) -> None:
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
        deadline = time.monotonic() + LONGEST_S
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
        started.wait(LONGEST_S)
        try:
            if made:
                yield made[0]
        finally:
            stop.set()
            thread.join(LONGEST_S)
        assert not thread.is_alive()
        if failures:
            raise failures[0]


@dataclass(slots=True)
class ServerProcess:
    process: subprocess.Popen[str]
    url: str
    lines: list[str]
    reader: threading.Thread

    def wait_ready(self) -> None:
        self._wait(lambda: httpx.get(f"{self.url}/health", timeout=LONGEST_S).status_code == 200)

    def wait_log(self, text: str) -> None:
        """Until the process has said it."""
        self._wait(lambda: text in self.log)

    def wait_exit(self) -> int:
        """The exit code, after which the log is whole."""
        code = self.process.wait(LONGEST_S)
        self.reader.join(LONGEST_S)
        return code

    def _wait(self, come: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONGEST_S
        while not come():
            assert self.process.poll() is None, self.lines
            assert time.monotonic() < deadline, self.lines
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
    listening = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"listening on (http://\S+?),", line):
                server.url = found[1]
                listening.set()
        listening.set()

    server = ServerProcess(process, "", lines, threading.Thread(target=read))
    server.reader.start()
    try:
        assert listening.wait(LONGEST_S), lines
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        server.wait_exit()
