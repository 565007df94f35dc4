"""Runs the server in this process until a signal, or a fault of the engine, ends it.

It listens at once and answers 503 until the engine is ready. The first SIGTERM or SIGINT drains: new requests get 503,
open ones go on to their ends, then the process is done with exit code 0. A second signal stops at once, with the code
of a process that a signal ended. An engine that fails, or never comes up, ends it with code 1 or its error.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import uvicorn
import uvloop

from ostinato.engine.async_engine import AsyncEngine
from ostinato.engine.status import EngineState
from ostinato.errors import ConfigError
from ostinato.server.app import create_app
from ostinato.server.serving import DEFAULT_MAX_BODY_BYTES

logger = logging.getLogger("ostinato")

BACKLOG = 2048
"""Connections that may wait to be accepted, as uvicorn has it."""

FLUSH_S = 10
"""How long clients may take to read the rest of their answers once all are made, or the engine has failed."""

STOP_S = 5
"""How long a stop that is not to wait waits for the engine's thread, which may be in a long step."""

SWITCH_INTERVAL_S = 0.0005
"""How long the event loop may keep the interpreter when the engine's thread wants it: less than most steps take.
Python's own 5 ms are several."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """`port` 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = 8000
    model_names: Sequence[str]
    api_keys: Sequence[str] = ()
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    log_level: str = "info"
    tool_call_parser: str | None = None
    enable_sleep_mode: bool = False


def run_server(engine: AsyncEngine, config: ServerConfig) -> int:
    """Returns the exit code. Raises ConfigError if the address cannot be had, and what making the engine raised."""
    with contextlib.closing(_listen(config.host, config.port)) as sock:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(engine, config, sock))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)  # now, so that whoever reads in the log that it listens can connect
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port"
        ) from error
    return sock


class _Server(uvicorn.Server):
    """Leaves signals to `_serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def _serve(engine: AsyncEngine, config: ServerConfig, sock: socket.socket) -> int:
    app = create_app(
        engine,
        model_names=config.model_names,
        api_keys=config.api_keys,
        max_body_bytes=config.max_body_bytes,
        tool_call_parser=config.tool_call_parser,
        enable_sleep_mode=config.enable_sleep_mode,
    )
    server = _Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,  # its lines go where those of the caller go
            log_level=config.log_level if config.log_level == "debug" else "warning",
            access_log=config.log_level == "debug",
            server_header=False,
            timeout_keep_alive=30,  # longer than common clients keep an idle connection: they should close it first
            timeout_graceful_shutdown=FLUSH_S,
        )
    )
    life = _Life(engine, server)
    engine.start()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, life.on_signal, number)
    host, port = sock.getsockname()[:2]
    logger.info("listening on http://%s:%d, the engine is starting", f"[{host}]" if ":" in host else host, port)
    watcher = asyncio.create_task(life.watch())
    await server.serve([sock])
    return await life.finish(watcher)


class _Life:
    """From start to exit code."""

    def __init__(self, engine: AsyncEngine, server: uvicorn.Server) -> None:
        self._engine, self._server = engine, server
        self._signals: list[int] = []
        self._at_once = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def on_signal(self, number: int) -> None:
        self._signals.append(number)
        if len(self._signals) == 1:
            logger.info("%s: draining %d requests", signal.Signals(number).name, self._engine.num_open)
            self._engine.begin_drain()
            task = asyncio.create_task(self._drain())
            self._tasks.add(task)
        else:
            logger.warning("%s again: stopping at once", signal.Signals(number).name)
            self._server.force_exit = self._server.should_exit = True
            self._at_once.set()

    async def _drain(self) -> None:
        with contextlib.suppress(Exception):  # a failed start is told by `watch`
            await self._engine.ready()
        await self._engine.idle()
        self._server.should_exit = True

    async def watch(self) -> None:
        """Ends the server when the engine ends, or does not come up; `finish` tells of that."""
        with contextlib.suppress(Exception):
            await self._engine.ready()
            # what is there now stays: the collector need not walk through all of it in the middle of a step
            gc.collect()
            gc.freeze()
            logger.info("ready")
            await self._engine.ended()
        self._server.should_exit = True

    async def finish(self, watcher: asyncio.Task[None]) -> int:
        """The server no longer serves: the engine goes too."""
        watcher.cancel()
        failed = self._engine.state is EngineState.DEAD
        closing = asyncio.create_task(self._engine.close())
        if not failed:
            # all is answered, but the thread may hang in a step whose clients have left: a second signal still counts
            logger.info("closing the engine")
            hurry = asyncio.create_task(self._at_once.wait())
            await asyncio.wait([closing, hurry], return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
        await asyncio.wait([closing], timeout=STOP_S)
        code = 1 if failed else 128 + self._signals[-1] if self._at_once.is_set() else 0
        if not closing.done():
            logger.warning("the engine's thread is busy and is left behind")
            logging.shutdown()
            os._exit(code)  # the interpreter cannot end in good order around a thread that runs kernels
        await closing
        if failed:
            await self._engine.ready()  # raises if the engine never came up
        return code
