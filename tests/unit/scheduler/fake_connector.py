"""A connector without a device, over the cells of the fake runner: host memory for what the pool forgets, and loads
that end after as many polls as a test likes. Blocks that are being loaded hold nothing that anyone may read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ostinato.connectors.protocol import ConnectorStats, LoadedKV, Matched
from ostinato.request import Request

Cells = dict[tuple[int, int], tuple[tuple[int, ...], int]]
Content = list[tuple[tuple[int, ...], int]]


@dataclass
class Receiving:
    """`blocks` with the content that each is to have; `polls` until the load ends, with so many of them there."""

    request: Request
    blocks: list[tuple[int, Content]]
    num_good: int
    polls: int


@dataclass
class Meta:
    saves: list[tuple[int, bytes]]
    loads: list[tuple[int, Content]]
    async_loads: list[Receiving]


@dataclass
class FakeConnector:
    """`load_kv_async` is its answer; `delay()` in polls, and `num_bad()` blocks that do not come, of each load."""

    block_size: int = 4
    load_kv_async: bool | None = None
    delay: Callable[[], int] = lambda: 2
    num_bad: Callable[[], int] = lambda: 0
    cells: Cells = field(default_factory=dict)
    loads_into: Callable[[list[int]], None] = lambda block_ids: None
    host: dict[bytes, Content] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    num_async: int = 0
    num_sync: int = 0

    def __post_init__(self) -> None:
        self._found: list[Content] = []
        self._next = Meta([], [], [])
        self.under_way: list[Receiving] = []
        self._ended: list[LoadedKV] = []

    # -- the scheduler's side ----------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, block_hashes: Sequence[bytes], num_computed_tokens: int
    ) -> Matched:
        self._found = []
        for digest in block_hashes[num_computed_tokens // self.block_size :]:
            if digest not in self.host:
                break
            self._found.append(self.host[digest])
        return len(self._found) * self.block_size, self.load_kv_async

    def update_state_after_alloc(
        self,
        request: Request,
        block_ids: Sequence[int],
        num_computed_tokens: int,
        num_external_tokens: int,
        load_kv_async: bool = False,
    ) -> None:
        first, count = num_computed_tokens // self.block_size, num_external_tokens // self.block_size
        blocks = list(zip(block_ids[first : first + count], self._found, strict=False))
        if load_kv_async:
            assert all(request is not load.request for load in [*self._next.async_loads, *self.under_way])
            num_good = max(0, count - self.num_bad())
            if num_good < count:
                self.failed.add(request.request_id)
            self._next.async_loads.append(Receiving(request, blocks, num_good, self.delay()))
            self.num_async += 1
        elif count:
            self._next.loads += blocks
            self.num_sync += 1

    def blocks_computed(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """They are saved when the pool needs their room."""

    def block_evicted(self, block_id: int, block_hash: bytes) -> None:
        self._next.saves.append((block_id, block_hash))

    def build_connector_meta(self) -> Meta:
        meta, self._next = self._next, Meta([], [], [])
        return meta

    def update_connector_output(self, finished: Sequence[object]) -> None:
        for load in finished:
            assert isinstance(load, Receiving)
            self._ended.append(LoadedKV(load.request, load.num_good * self.block_size))

    def get_finished_recving(self) -> list[LoadedKV]:
        ended, self._ended = self._ended, []
        return ended

    def step_dropped(self, meta: object) -> None:
        """Nothing of it was begun."""
        assert isinstance(meta, Meta)
        for load in meta.async_loads:
            self.failed.add(load.request.request_id)
            self._next.async_loads.append(Receiving(load.request, [], 0, 1))

    def request_finished(self, request: Request) -> None:
        """What loads for it goes on."""

    def forget_contents(self) -> None:
        self.host.clear()

    def wait_for_change(self, timeout_s: float) -> None:
        """A match is known at once."""

    def stats(self) -> ConnectorStats:
        return ConnectorStats(async_loads=self.num_async)

    def close(self) -> None:
        """Nothing is held."""

    # -- the worker's side -------------------------------------------------------------------------------------------

    def start(self, meta: object) -> None:
        """Saves first: a block may be saved and then loaded with another content."""
        assert isinstance(meta, Meta)
        nothing: tuple[tuple[int, ...], int] = ((-1,), -1)
        for block_id, digest in meta.saves:
            self.host[digest] = [self.cells.get((block_id, place), nothing) for place in range(self.block_size)]
        self.loads_into([block_id for block_id, _ in meta.loads])
        for block_id, content in meta.loads:
            self._write(block_id, content)
        for load in meta.async_loads:
            self.loads_into([block_id for block_id, _ in load.blocks])
            for block_id, _ in load.blocks:
                self._write(block_id, [nothing] * self.block_size)
            self.under_way.append(load)

    def get_finished(self) -> list[object]:
        for load in self.under_way:
            load.polls -= 1
        ended = [load for load in self.under_way if load.polls <= 0]
        self.under_way = [load for load in self.under_way if load.polls > 0]
        for load in ended:
            for block_id, content in load.blocks[: load.num_good]:
                self._write(block_id, content)
        return list(ended)

    def check_apart(self, tables: list[list[int]]) -> None:
        """No step has a block that is being written to."""
        writing = {block_id for load in self.under_way for block_id, _ in load.blocks}
        for table in tables:
            assert not writing & set(table), "a step runs over blocks that are being loaded"

    def _write(self, block_id: int, content: Content) -> None:
        for place, cell in enumerate(content):
            self.cells[block_id, place] = cell
