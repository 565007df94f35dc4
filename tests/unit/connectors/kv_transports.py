"""What carries the bytes of blocks: TCP, NIXL, or a stand-in for NIXL that reads in the same process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest

from ostinato.connectors.nixl import NixlMemory

MAX_BLOCK_BYTES = 4 * 2**20

needs_nixl = pytest.mark.skipif(find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed")


class _Agent(SimpleNamespace):
    __hash__ = object.__hash__


class StandIn:
    """The part of `nixl_cu13` that is used. Each read copies, and its state is then what `states` says, call by call;
    once that is empty, DONE. `registered` counts the regions that its agents hold; `agents` are those that are left.
    """

    def __init__(self) -> None:
        self.states: list[str] = []
        self.registered = 0
        self.agents: WeakSet[_Agent] = WeakSet()
        self.num_progressed = 0
        self.before_read: Callable[[], None] = lambda: None

    def nixl_agent_config(self, *, enable_prog_thread: bool, backends: list[str]) -> None:
        assert not enable_prog_thread
        assert backends == ["UCX"]

    def nixl_agent(self, name: str, config: None) -> SimpleNamespace:
        regions: list[tuple[int, int]] = []

        def register(regs: list[tuple[int, int, int, str]], kind: str) -> list[tuple[int, int, int, str]]:
            assert kind == "DRAM"
            regions.extend((address, num_bytes) for address, num_bytes, _, _ in regs)
            self.registered += len(regs)
            return regs

        def deregister(regs: list[tuple[int, int, int, str]]) -> None:
            self.registered -= len(regs)

        def progress() -> dict[str, list[bytes]]:
            self.num_progressed += 1
            return {}

        def read(operation: str, here: list[Any], there: list[Any], peer: object) -> SimpleNamespace:
            assert operation == "READ"
            assert peer
            (target, num_bytes, _), (source, same, _) = here[0], there[0]
            assert num_bytes == same
            assert any(first <= target and target + num_bytes <= first + size for first, size in regions)

            def copy() -> None:
                self.before_read()
                ctypes.memmove(target, source, num_bytes)

            return SimpleNamespace(copy=copy, release=lambda: None)

        def transfer(handle: SimpleNamespace) -> str:
            handle.copy()
            return check(handle)

        def check(handle: SimpleNamespace) -> str:
            return self.states.pop(0) if self.states else "DONE"

        agent = _Agent(
            backends={"UCX": 1},
            register_memory=register,
            deregister_memory=deregister,
            get_agent_metadata=name.encode,
            add_remote_agent=lambda metadata: metadata,
            get_new_notifs=progress,
            get_xfer_descs=lambda descs, kind: descs,
            initialize_xfer=read,
            transfer=transfer,
            check_xfer_state=check,
        )
        self.agents.add(agent)
        return agent


class Placed:
    """`get`, whose blocks are copied to `shared` memory, one after the other."""

    def __init__(self, get: Callable[[bytes], memoryview | bytes | None], nixl: Any) -> None:
        self._get = get
        self.memory = np.zeros(16 * 2**20, np.uint8)
        self.shared = NixlMemory(nixl, self.memory)
        self._views: dict[bytes, memoryview] = {}
        self._used = 0

    def __call__(self, digest: bytes) -> memoryview | None:
        data = self._get(digest)
        if data is None:
            return None
        if digest not in self._views:
            self._views[digest] = self.memory[self._used : self._used + len(data)].data
            self._views[digest][:] = data
            self._used += len(data)
        return self._views[digest]
