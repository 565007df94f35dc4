"""The worker's side of connectors that keep blocks in host memory: copies between the KV pool and host blocks.

On CUDA both directions run on a stream of their own, as a kernel that reads or writes pinned host memory itself, with
an event a layer; steps wait for those events, by name of the layer, where and how `Wait` says. On the CPU a thread
copies, and a step waits for a counter in memory instead of an event. Asynchronous loads have another stream, or thread:
a step waits for saves, which must not stand behind a long load that no step waits for.

N blocks of the pool, L layers, E elements of a block's layer, L * E of a block.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from ostinato.connectors.protocol import Wait
from ostinato.kernels import ops
from ostinato.kv.storage import KVStorage

logger = logging.getLogger("ostinato")

__all__ = ["AsyncLoad", "BlockMover", "Copy", "HostBlocks", "Loaded", "Transfers"]

_PAUSE_S = 0.0005


class Copy(NamedTuple):
    """One block: its place in host memory and in the pool."""

    host: int
    block_id: int


class AsyncLoad(NamedTuple):
    """Copies that no step waits for, or none: it is then done once those before it are. Numbers are its own. `saves`
    are of blocks that nothing but this load, and what comes after it, overwrites."""

    number: int
    copies: tuple[Copy, ...]
    saves: tuple[Copy, ...] = ()


class Loaded(NamedTuple):
    """An `AsyncLoad` is done: whether its copies succeeded."""

    number: int
    succeeded: bool


@dataclass(frozen=True, slots=True)
class Transfers:
    """What one step has to move, and what begins with it. Saves come first: a block may be saved and then loaded with
    another content."""

    number: int
    saves: tuple[Copy, ...] = ()
    loads: tuple[Copy, ...] = ()
    async_loads: tuple[AsyncLoad, ...] = ()


class HostBlocks:
    """`blocks` [num_blocks, L, E] in host memory, pinned where the pool is on a CUDA device."""

    def __init__(self, storage: KVStorage, num_blocks: int) -> None:
        shape = (num_blocks, storage.num_layers, storage.block_bytes // storage.num_layers)
        self.blocks = torch.empty(shape, dtype=torch.uint8, pin_memory=storage.pool.is_cuda)

    def view(self, slot: int) -> memoryview:
        """The bytes of one block, writable."""
        return self.blocks[slot].reshape(-1).numpy().data


class BlockMover:
    """`wait`: how steps wait for loads."""

    def __init__(self, storage: KVStorage, host: HostBlocks, wait: Wait) -> None:
        self._wait = wait
        self._pool = storage.pool.flatten(2).view(torch.uint8)  # [N, L, E]
        self._host = host.blocks
        self._num_layers = storage.num_layers
        if self._pool.is_cuda:
            self._load_kernel()
        self._lanes: _Lanes = (
            _StreamLanes(storage.pool.device, self._num_layers)
            if storage.pool.is_cuda
            else _ThreadLanes(self._num_layers)
        )
        self._loading = False

    @property
    def wait(self) -> Wait:
        return self._wait

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._lanes.named()

    def requires_piecewise_for_cudagraph(self, meta: object | None) -> bool:
        return self._wait is Wait.HOOKS and isinstance(meta, Transfers) and bool(meta.loads)

    def start_load_kv(self, meta: object | None) -> None:
        self.begin(meta)

    def begin(self, meta: object | None) -> Callable[[], None]:
        """`start_load_kv`; returns what waits, on any thread, until all that is saved is in host memory."""
        self._loading = False
        self._lanes.forget_failure()
        if meta is None:
            return _nothing
        assert isinstance(meta, Transfers)
        self._loading = bool(meta.loads)
        wait_for_saves = self._lanes.save(self._copies(meta.saves, load=False))
        for load in meta.async_loads:  # before the step's loads, which may be of what these save
            saves = self._copies(load.saves, load=False)
            self._lanes.start_async(load.number, saves, self._copies(load.copies, load=True))
        self._lanes.load(meta.number, self._copies(meta.loads, load=True))
        if self._loading and self._wait is Wait.STEP:
            for layer in range(self._num_layers):
                self._lanes.wait(layer)
        return wait_for_saves

    def wait_for_layer_load(self, layer: int) -> None:
        if self._loading and self._wait is Wait.HOOKS:
            self._lanes.wait(layer)

    def save_kv_layer(self, layer: int) -> None:
        """Blocks are saved whole, once they are complete."""

    def wait_in_graph(self, layer: int) -> None:
        if self._wait is Wait.EVENTS:
            self._lanes.wait(layer)

    def wait_for_loads(self, timeout_s: float) -> bool:
        ended, due = self._lanes.loads_ended(), time.monotonic() + timeout_s
        while not ended():
            if time.monotonic() >= due:
                return False
            time.sleep(_PAUSE_S)
        return True

    def wait_for_save(self) -> None:
        """`start_load_kv` has made the step wait already."""

    def get_finished(self) -> Sequence[object]:
        return self._lanes.finished()

    def close(self) -> None:
        self._lanes.close()

    def _load_kernel(self) -> None:
        """Copies a block that is nobody's: a kernel's first launch waits for everything that the device is at."""
        block = self._pool.new_zeros(1, *self._pool.shape[1:])
        ids = torch.zeros(1, dtype=torch.int32)
        _BlockCopies(block, block.clone(), ids, ids)(0, self._num_layers)

    def _copies(self, copies: Sequence[Copy], *, load: bool) -> _BlockCopies | None:
        """None for no blocks."""
        if not copies:
            return None
        hosts = torch.tensor([copy.host for copy in copies], dtype=torch.int32)
        blocks = torch.tensor([copy.block_id for copy in copies], dtype=torch.int32)
        if load:
            return _BlockCopies(self._host, self._pool, hosts, blocks)
        return _BlockCopies(self._pool, self._host, blocks, hosts)


class _BlockCopies:
    """Blocks `source_ids` [n] int32 of `source` to `target_ids` of `target`. Called with `(first_layer, num_layers)`,
    always on the same stream: the ids are sent to the device and freed on it."""

    def __init__(
        self, source: torch.Tensor, target: torch.Tensor, source_ids: torch.Tensor, target_ids: torch.Tensor
    ) -> None:
        self._source, self._target = source, target
        self._ids = torch.stack([source_ids, target_ids])
        self._device = source.device if source.is_cuda else target.device

    def __call__(self, first_layer: int, num_layers: int) -> None:
        if self._ids.device != self._device:
            self._ids = self._ids.pin_memory().to(self._device, non_blocking=True)
        source_ids, target_ids = self._ids[0], self._ids[1]
        ops.copy_blocks(self._source, self._target, source_ids, target_ids, first_layer, num_layers)


def _nothing() -> None:
    """What there is to wait for when nothing is under way."""


class _Lanes(Protocol):
    """Where copies run, beside the steps."""

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What steps read to know how far a load is."""

    def forget_failure(self) -> None:
        """A load that failed has failed its step: it is nothing to later ones."""

    def save(self, saves: _BlockCopies | None) -> Callable[[], None]:
        """Whatever is launched afterwards comes after the saves; what is returned waits for them on the host."""

    def load(self, number: int, loads: _BlockCopies | None) -> None:
        """Begins what a step waits for, after all saves so far. Transfer `number` is done with it."""

    def start_async(self, number: int, saves: _BlockCopies | None, loads: _BlockCopies | None) -> None:
        """Begins a load that nothing waits for, after the saves so far and its own. Later loads come after these saves.
        Without a load, what there is to report is that those before it are done."""

    def wait(self, layer: int) -> None:
        """What follows comes after the newest load of this layer."""

    def loads_ended(self) -> Callable[[], bool]:
        """What tells whether all that `load` has begun until now is over."""

    def finished(self) -> list[object]:
        """Numbers of what is done since the last call, or has failed, and `Loaded` for each asynchronous load. What is
        launched afterwards comes after those."""

    def close(self) -> None: ...


class _StreamLanes:
    """Two streams beside that of the steps, the second for asynchronous loads. They never wait for steps: a block that
    is saved was completed by a step that has been collected, and one that is loaded was free since before (the
    scheduler's fences). So no step can wait for a load that waits for the step."""

    def __init__(self, device: torch.device, num_layers: int) -> None:
        self._num_layers = num_layers
        with torch.cuda.device(device):
            self._stream, self._async_stream = torch.cuda.Stream(), torch.cuda.Stream()
            self._events = [torch.cuda.Event(external=True) for _ in range(num_layers)]
            for event in self._events:  # one that was never recorded does not exist yet: a graph would not wait for it
                event.record(self._stream)
        self._saved: torch.cuda.Event | None = None  # the newest saves
        self._async_saved: torch.cuda.Event | None = None  # those of asynchronous loads
        self._under_way: list[tuple[int, torch.cuda.Event]] = []
        self._async_under_way: list[tuple[int, torch.cuda.Event]] = []

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ()

    def forget_failure(self) -> None:
        """The device tells of its faults itself."""

    def save(self, saves: _BlockCopies | None) -> Callable[[], None]:
        if saves is None:
            return _nothing
        steps = torch.cuda.current_stream()
        with torch.cuda.stream(self._stream):
            saves(0, self._num_layers)
            saved = torch.cuda.Event()
            saved.record(self._stream)
        steps.wait_event(saved)
        self._saved = saved
        return saved.synchronize

    def load(self, number: int, loads: _BlockCopies | None) -> None:
        with torch.cuda.stream(self._stream):
            if loads is not None:
                if self._async_saved is not None:  # to host memory that may be read here
                    self._stream.wait_event(self._async_saved)
                for layer in range(self._num_layers):
                    loads(layer, 1)
                    self._events[layer].record(self._stream)
            done = torch.cuda.Event()
            done.record(self._stream)
        self._under_way.append((number, done))

    def start_async(self, number: int, saves: _BlockCopies | None, loads: _BlockCopies | None) -> None:
        with torch.cuda.stream(self._async_stream):
            if self._saved is not None:
                self._async_stream.wait_event(self._saved)
            if saves is not None:
                saves(0, self._num_layers)
                self._async_saved = torch.cuda.Event()
                self._async_saved.record(self._async_stream)
            if loads is not None:
                loads(0, self._num_layers)
            done = torch.cuda.Event()
            done.record(self._async_stream)
        self._async_under_way.append((number, done))

    def wait(self, layer: int) -> None:
        self._events[layer].wait()

    def loads_ended(self) -> Callable[[], bool]:
        ended = torch.cuda.Event()  # of its own: `load` may have failed before it recorded one
        ended.record(self._stream)
        return ended.query

    def finished(self) -> list[object]:
        done: list[object] = []
        while self._under_way and self._under_way[0][1].query():
            done.append(self._under_way.pop(0)[0])
        while self._async_under_way and self._async_under_way[0][1].query():
            number, loaded = self._async_under_way.pop(0)
            torch.cuda.current_stream().wait_event(loaded)  # costs nothing any more, and orders the two streams
            done.append(Loaded(number, succeeded=True))
        return done

    def close(self) -> None:
        self._stream.synchronize()
        self._async_stream.synchronize()


class _ThreadLanes:
    """Two threads, the second for asynchronous loads; saves are done at once. `pending` [L] int32 is 1 while a layer is
    being loaded, 0 when it is there, -1 when that failed."""

    def __init__(self, num_layers: int) -> None:
        self._pending = torch.zeros(num_layers, dtype=torch.int32)
        self._jobs: queue.SimpleQueue[tuple[int, _BlockCopies | None] | None] = queue.SimpleQueue()
        self._async_jobs: queue.SimpleQueue[tuple[int, _BlockCopies | None] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name="ostinato-kv", daemon=True),
            threading.Thread(target=self._run_async, name="ostinato-kv-async", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "connector.pending", self._pending

    def forget_failure(self) -> None:
        self._pending.clamp_(min=0)

    def save(self, saves: _BlockCopies | None) -> Callable[[], None]:
        if saves is not None:
            saves(0, len(self._pending))
        return _nothing

    def load(self, number: int, loads: _BlockCopies | None) -> None:
        if loads is not None:
            for layer in range(len(self._pending)):  # the step before may still wait for a load of its own
                self.wait(layer)
            self._pending.fill_(1)
        self._jobs.put((number, loads))

    def start_async(self, number: int, saves: _BlockCopies | None, loads: _BlockCopies | None) -> None:
        if saves is not None:
            saves(0, len(self._pending))
        self._async_jobs.put((number, loads))

    def wait(self, layer: int) -> None:
        ops.wait_loaded(self._pending, layer)

    def loads_ended(self) -> Callable[[], bool]:
        return lambda: not bool((self._pending > 0).any())

    def finished(self) -> list[object]:
        done: list[object] = []
        while not self._done.empty():
            done.append(self._done.get())
        return done

    def close(self) -> None:
        self._jobs.put(None)
        self._async_jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            number, loads = job
            if loads is not None:
                try:
                    for layer in range(len(self._pending)):
                        loads(layer, 1)
                        self._pending[layer] = 0
                except Exception:
                    logger.exception("loading KV failed")
                    self._pending.fill_(-1)
            self._done.put(number)

    def _run_async(self) -> None:
        while (job := self._async_jobs.get()) is not None:
            number, loads = job
            succeeded = True
            if loads is not None:
                try:
                    loads(0, len(self._pending))
                except Exception:
                    logger.exception("loading KV failed; it is computed")
                    succeeded = False
            self._done.put(Loaded(number, succeeded))
