"""Each request's block table: found in the cache, allocated, extended, and let go.

Ids only. A live request's table only ever grows at its end, so the device's copy needs appends and nothing else. The
manager never waits and never takes from anyone: it says that it is short, and the scheduler decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ostinato.errors import ConfigError
from ostinato.kv.block_pool import BlockPool, BlockStates
from ostinato.kv.prefix import HashChain
from ostinato.request import Request

__all__ = ["KVManager", "PrefixHit"]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest cached prefix of a request, in full blocks. Only a finding: nothing is held until `allocate`."""

    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0


@dataclass(slots=True)
class _Table:
    block_ids: list[int]
    num_registered: int
    cacheable: bool = True


@dataclass(slots=True)
class KVManager:
    """Block tables over one pool. `num_blocks` counts the scratch block; `block_size` is in tokens."""

    num_blocks: int
    block_size: int
    enable_prefix_caching: bool = True
    on_evict: Callable[[int, bytes], None] | None = None
    prefix_query_tokens: int = field(default=0, init=False)  # known tokens of the requests that were looked up
    prefix_hit_tokens: int = field(default=0, init=False)  # how many of them the cache held
    _pool: BlockPool = field(init=False, repr=False)
    _tables: dict[str, _Table] = field(default_factory=dict, init=False, repr=False)
    _chains: dict[str, HashChain] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size={self.block_size}: must be at least 1 token")
        self._pool = BlockPool(self.num_blocks, self.on_evict)

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_allocatable(self) -> int:
        return self._pool.num_allocatable

    @property
    def num_cached(self) -> int:
        return self._pool.num_cached

    def empty_blocks(self) -> list[int]:
        """Blocks that nothing live or cached is in."""
        return self._pool.blank_blocks()

    def states(self) -> BlockStates:
        """What every block is used for now; a copy."""
        return self._pool.states()

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the KV of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def table(self, request_id: str) -> Sequence[int]:
        """The request's blocks in the order of its tokens; empty when it holds none."""
        table = self._tables.get(request_id)
        return table.block_ids if table else ()

    def match(self, request: Request) -> PrefixHit:
        """The longest cached prefix of the known tokens, never all of them: the last one has to run to sample a token.

        Nothing for a request that wants the log-probabilities of its prompt, because they come from running it.
        """
        if not self.enable_prefix_caching or request.params.prompt_logprobs is not None:
            return PrefixHit()
        block_ids: list[int] = []
        for digest in self.hashes_to_match(request):
            block_id = self._pool.lookup(digest)
            if block_id is None:
                break
            block_ids.append(block_id)
        return PrefixHit(tuple(block_ids), len(block_ids) * self.block_size)

    def hashes_to_match(self, request: Request) -> Sequence[bytes]:
        """Digests of the full blocks that a cached prefix may have: all but the last known token's."""
        return self._digests(request)[: (len(request.tokens) - 1) // self.block_size]

    def num_taken(self, hit: PrefixHit, num_tokens: int) -> int:
        """Free blocks that a table for `num_tokens` tokens beginning with `hit` would use up."""
        new = max(0, self.num_blocks_for(num_tokens) - len(hit.block_ids))
        return new + self._pool.num_taken_by(hit.block_ids)

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that the request's table lacks to hold `num_tokens` tokens."""
        return max(0, self.num_blocks_for(num_tokens) - len(self.table(request.request_id)))

    def allocate(self, request: Request, hit: PrefixHit, num_tokens: int) -> list[int] | None:
        """Give the request its first blocks, `hit` and new ones for `num_tokens` tokens in all; None when short.

        Returns the whole table. `hit` must come from `match` with nothing allocated or released in between.
        """
        assert request.request_id not in self._tables, f"request {request.request_id} already has a block table"
        if self.num_taken(hit, num_tokens) > self._pool.num_free:
            return None
        self._pool.touch(hit.block_ids)
        new = self._pool.allocate(max(0, self.num_blocks_for(num_tokens) - len(hit.block_ids)))
        table = [*hit.block_ids, *new]
        self._tables[request.request_id] = _Table(table, num_registered=len(hit.block_ids))
        if self.enable_prefix_caching and request.params.prompt_logprobs is None:
            self.prefix_query_tokens += len(request.tokens)
            self.prefix_hit_tokens += hit.num_tokens
        return list(table)

    def extend(self, request: Request, num_tokens: int) -> list[int] | None:
        """Grow the request's table to hold `num_tokens` tokens. Returns the new blocks, None (and none) when short."""
        missing = self.num_missing(request, num_tokens)
        if missing > self._pool.num_free:
            return None
        new = self._pool.allocate(missing)
        self._tables[request.request_id].block_ids += new
        return new

    def register_full_blocks(self, request: Request, num_tokens: int) -> list[tuple[int, bytes]]:
        """The first `num_tokens` tokens are known and their KV is written: make their full blocks findable. Returns
        those that were not before, with their digests."""
        table = self._tables[request.request_id]
        num_full = num_tokens // self.block_size
        if not self.enable_prefix_caching or not table.cacheable or num_full <= table.num_registered:
            return []
        digests = self._digests(request)
        blocks = [(table.block_ids[index], digests[index]) for index in range(table.num_registered, num_full)]
        for block_id, digest in blocks:
            self._pool.register(block_id, digest)
        table.num_registered = num_full
        return blocks

    def detach(self, request_id: str) -> list[int]:
        """Take the table away from the request. Its blocks stay held until they are given to `release`."""
        table = self._tables.pop(request_id, None)
        return table.block_ids if table else []

    def release(self, block_ids: Sequence[int]) -> None:
        """Let go of a detached table, tail first: a prefix is worth more than what follows it."""
        self._pool.free(reversed(block_ids))

    def free(self, request_id: str) -> None:
        """Detach and release at once, for when no step in flight can touch the blocks."""
        self.release(self.detach(request_id))

    def forget(self, request_id: str) -> None:
        """The request is over: drop what is remembered about its tokens."""
        self._chains.pop(request_id, None)

    def num_freed_by(self, tables: Iterable[Sequence[int]]) -> int:
        """Blocks that would become free if all these tables were let go of."""
        return self._pool.num_freed_by(block_id for table in tables for block_id in table)

    def forget_contents(self) -> None:
        """No cached prefix may be found any more; live tables, which mix old content and new, stay private."""
        self._pool.forget_contents()
        for table in self._tables.values():
            table.cacheable = False

    def reaches(self, request: Request, num_blocks: int) -> bool:
        """Whether the request holds a block that a pool of `num_blocks` does not have."""
        return max(self.table(request.request_id), default=0) >= num_blocks

    def resize(self, num_blocks: int) -> None:
        """Another number of blocks, of which those that go are held by nobody (`BlockPool.resize`)."""
        self._pool.resize(num_blocks)
        self.num_blocks = num_blocks

    def check_integrity(self, detached: Iterable[Sequence[int]] = ()) -> None:
        """Raise OstinatoError unless every block reference belongs to a live table or to one in `detached`."""
        self._pool.check_integrity([*(table.block_ids for table in self._tables.values()), *detached])

    def _digests(self, request: Request) -> Sequence[bytes]:
        chain = self._chains.get(request.request_id)
        if chain is None:
            chain = self._chains[request.request_id] = HashChain(self.block_size)
        return chain.digests(request.tokens)
