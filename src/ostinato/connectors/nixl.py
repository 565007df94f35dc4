"""All that is said to NIXL: memory that others may read, and reads from the memory of others. Host memory, over UCX.

`nixl-cu13` is optional. Neither end has a thread of NIXL's, which would keep a core busy for as long as the process
lives: a reader drives its own reads, and the other end calls `progress` while somebody reads.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable
from importlib import import_module
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.errors import ConfigError, ConnectorError

__all__ = ["NixlMemory", "NixlReader", "choose_nixl"]

logger = logging.getLogger("ostinato")

_PACKAGE = "nixl-cu13"
_MODULE = "nixl_cu13"
_SPINS = 100  # looks at a read before the thread begins to sleep between them
_PAUSE_S = 50e-6


def choose_nixl(transport: object) -> Any | None:
    """The module of NIXL, or None where bytes go over TCP. `transport` is "tcp", "nixl", or "auto": NIXL where it
    can be imported.

    Raises ConfigError for another name, and for "nixl" where it cannot be imported.
    """
    if transport not in ("auto", "tcp", "nixl"):
        raise ConfigError(f"transport={transport!r}: must be auto, tcp or nixl", field="transport")
    if transport == "tcp":
        return None
    try:
        return _import_nixl()
    except (ImportError, OSError) as error:
        if transport == "nixl":
            raise ConfigError(
                f"transport='nixl': NIXL cannot be imported ({error}); pip install {_PACKAGE}, or 'ostinato[nixl]'",
                field="transport",
            ) from error
        if not isinstance(error, ModuleNotFoundError):
            logger.warning("%s is installed and cannot be imported, KV blocks go over TCP: %s", _PACKAGE, error)
        return None


def _import_nixl() -> Any:
    """The import switches off errors of all logging, and lets NIXL print each agent to stdout, which may be where a
    program's output goes: neither is left so."""
    raising = logging.raiseExceptions
    module = import_module(_MODULE)
    logging.raiseExceptions = raising
    log = logging.getLogger("nixl")
    if log.level == logging.INFO:  # as it comes, and not another that NIXL_LOG_LEVEL has set
        log.setLevel(logging.WARNING)
    return module


def _open_agent(nixl: Any) -> Any:
    """Raises ConnectorError."""
    failure = None
    try:
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        agent = nixl.nixl_agent(f"ostinato-{uuid.uuid4().hex}", config)
        if "UCX" in agent.backends:
            return agent
        failure = "its UCX plugin is missing"
    except Exception as error:  # the bindings' own classes have no base but Exception
        failure = repr(error)
    raise ConnectorError(f"NIXL has no agent: {failure}")


class NixlMemory:
    """`memory` [n] uint8, which the readers that know `metadata` may read. Safe from any thread."""

    def __init__(self, nixl: Any, memory: NDArray[np.uint8]) -> None:
        """Raises ConnectorError if NIXL does not want it."""
        self._memory, self._lock = memory, Lock()
        self._agent = _open_agent(nixl)
        self._failed = False
        try:
            self._registered = self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
            self.metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:
            raise ConnectorError(f"NIXL cannot register {memory.nbytes} bytes of host memory: {error!r}") from error

    def address(self, data: memoryview) -> int:
        """Where `data` lie, which must be in this memory. Raises ConnectorError."""
        address = int(np.frombuffer(data, np.uint8).ctypes.data) if data.nbytes else self._memory.ctypes.data
        if not 0 <= address - self._memory.ctypes.data <= self._memory.nbytes - data.nbytes:
            raise ConnectorError("a block does not lie in the memory that NIXL knows")
        return address

    def progress(self) -> None:
        """Lets reads go on that need this end for it. To be called again and again while somebody reads."""
        with self._lock:
            if self._agent is not None:
                try:
                    self._agent.get_new_notifs()
                except Exception as error:  # the reader notices, in its time
                    if not self._failed:
                        logger.warning("NIXL makes no progress: %r", error)
                    self._failed = True

    def close(self) -> None:
        """Reads that come later fail, or are of other data and do not match their checksum."""
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is not None:
                with contextlib.suppress(Exception):
                    agent.deregister_memory(self._registered)


class NixlReader:
    """Reads from the memory of another agent, one read at a time. From any one thread at a time.

    Nothing writes into what a read returned before the next one. After a failure the whole agent goes: only then is it
    sure that a read which was given up writes no more.
    """

    def __init__(self, nixl: Any, max_bytes: int) -> None:
        self._nixl, self._max_bytes = nixl, max_bytes
        self._agent: Any | None = None
        self._landing: NDArray[np.uint8] | None = None
        self._metadata: bytes | None = None
        self._peer: object = None

    def join(self, metadata: bytes) -> None:
        """Reads are from the agent of this metadata from now on. Raises ConnectorError."""
        if self._agent is not None and metadata == self._metadata:
            return
        self.close()
        self._agent = agent = _open_agent(self._nixl)
        self._landing = landing = np.empty(max(1, self._max_bytes), np.uint8)
        try:
            agent.register_memory([(landing.ctypes.data, landing.nbytes, 0, "")], "DRAM")
            self._peer, self._metadata = agent.add_remote_agent(metadata), metadata
            return
        except Exception as error:
            failure = repr(error)
        del agent
        self.close()
        raise ConnectorError(f"NIXL does not know the other end: {failure}")

    def read(self, address: int, num_bytes: int, due: float, stopped: Callable[[], bool]) -> memoryview:
        """What is at `address` of the other end, at most `max_bytes`. `due` is of `time.monotonic`.

        Raises ConnectorError if it fails, is late, or `stopped()`; `join` has then to be called anew.
        """
        agent, landing = self._agent, self._landing
        if agent is None or landing is None:
            raise ConnectorError("NIXL has not joined the other end")
        if not 0 <= num_bytes <= self._max_bytes:
            raise ConnectorError(f"a block of {num_bytes} bytes lies there, at most {self._max_bytes} are allowed")
        if num_bytes == 0:
            return landing[:0].data
        failure = self._transfer(agent, landing, address, num_bytes, due, stopped)
        if failure is None:
            return landing[:num_bytes].data
        # raised from here: a traceback through NIXL's frames would keep the agent, and so the read, alive
        del agent
        self.close()
        raise ConnectorError(f"NIXL: {failure}")

    def _transfer(
        self,
        agent: Any,
        landing: NDArray[np.uint8],
        address: int,
        num_bytes: int,
        due: float,
        stopped: Callable[[], bool],
    ) -> str | None:
        """Why it failed."""
        handle = None
        try:
            here = agent.get_xfer_descs([(landing.ctypes.data, num_bytes, 0)], "DRAM")
            there = agent.get_xfer_descs([(address, num_bytes, 0)], "DRAM")
            handle = agent.initialize_xfer("READ", here, there, self._peer)
            state, num_looks = agent.transfer(handle), 0
            while state == "PROC":
                if stopped():
                    return "the read was given up"
                if time.monotonic() >= due:
                    return "the read has stalled"
                if num_looks >= _SPINS:
                    time.sleep(_PAUSE_S)
                num_looks += 1
                state = agent.check_xfer_state(handle)
            return None if state == "DONE" else f"the read ended in state {state}"
        except Exception as error:
            return repr(error)
        finally:
            if handle is not None:
                with contextlib.suppress(Exception):  # one that is still under way; it ends with the agent
                    handle.release()

    def close(self) -> None:
        """Ends a read that was given up. Safe to call twice."""
        self._agent = None  # first: with it goes all that may write into `_landing`
        self._landing = self._metadata = self._peer = None
