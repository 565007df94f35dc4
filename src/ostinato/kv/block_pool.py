"""Who holds which KV block: reference counts, a free list, and the content that free blocks still carry.

Block 0 is the scratch block that padded rows point at; it exists from the start and is never handed out. A freed block
whose content is known by hash stays findable until it is reused. Blocks without a hash are reused first, then hashed
ones, the longest free first (LRU). Every operation is O(1) per block.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ostinato.errors import CapacityError, ConfigError, OstinatoError

__all__ = ["SCRATCH_BLOCK", "BlockPool", "BlockStates"]

SCRATCH_BLOCK = 0
"""The block that padded rows read and write; no request ever owns it."""


@dataclass(frozen=True, slots=True)
class BlockStates:
    """Which blocks nobody holds: `free` ones have content that nobody can find, `cached` ones can be found by it."""

    num_blocks: int
    free: tuple[int, ...]
    cached: tuple[int, ...]

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - len(self.free) - len(self.cached)

    def letters(self) -> str:
        """One letter per block: s scratch, f free, c cached, u used."""
        found = bytearray(b"u") * self.num_blocks
        found[SCRATCH_BLOCK] = ord("s")
        for letter, block_ids in ((ord("f"), self.free), (ord("c"), self.cached)):
            for block_id in block_ids:
                found[block_id] = letter
        return found.decode()


class BlockPool:
    """Reference-counted block ids 1 .. num_blocks - 1. Raises ConfigError for fewer than two blocks."""

    def __init__(self, num_blocks: int, on_evict: Callable[[int, bytes], None] | None = None) -> None:
        """`on_evict(block_id, digest)` hears of a block whose content is about to be given up for another."""
        if num_blocks < 2:
            raise ConfigError(f"num_blocks={num_blocks}: must be at least 2, the scratch block and one to hand out")
        self._num_blocks, self._on_evict = num_blocks, on_evict
        self._refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, SCRATCH_BLOCK, -1))  # free, content unknown; the end is taken first
        self._evictable: OrderedDict[int, None] = OrderedDict()  # free, content known; the oldest is taken first

    @property
    def num_allocatable(self) -> int:
        """Blocks there are to hand out, free or not."""
        return self._num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their content, held or free."""
        return len(self._by_hash)

    def blank_blocks(self) -> list[int]:
        """Free blocks whose content nobody can find: what a check may overwrite."""
        return list(self._blank)

    def states(self) -> BlockStates:
        """A copy: it stays as it is while the pool goes on."""
        return BlockStates(self._num_blocks, tuple(self._blank), tuple(self._evictable))

    def num_refs(self, block_id: int) -> int:
        return self._refs[block_id]

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks, each held once; whatever they carried is forgotten.

        Raises CapacityError, and hands out none, when fewer are free.
        """
        if count > self.num_free:
            raise CapacityError(f"{count} KV blocks wanted, {self.num_free} of {self.num_allocatable} are free")
        return [self._take_free() for _ in range(count)]

    def touch(self, block_ids: Iterable[int]) -> None:
        """Hold blocks that carry known content once more; free ones leave the free list with their content."""
        for block_id in block_ids:
            if self._refs[block_id] == 0:
                del self._evictable[block_id]
            self._refs[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Let go of each block once, in the order given: of two that carry content, the first is reused first."""
        for block_id in block_ids:
            assert self._refs[block_id] > 0, f"KV block {block_id} was freed more often than it was taken"
            self._refs[block_id] -= 1
            if self._refs[block_id] > 0:
                continue
            if self._hashes[block_id] is None:
                self._blank.append(block_id)
            else:
                self._evictable[block_id] = None

    def num_freed_by(self, block_ids: Iterable[int]) -> int:
        """How many blocks would become free if each of `block_ids` were let go of once (repeats count)."""
        return sum(self._refs[block_id] == count for block_id, count in Counter(block_ids).items())

    def num_taken_by(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks `touch` would take off the free list."""
        return sum(self._refs[block_id] == 0 for block_id in block_ids)

    def register(self, block_id: int, digest: bytes) -> None:
        """Make a held block findable by its content. The first block with a content keeps it; a twin stays unknown."""
        assert self._refs[block_id] > 0, f"KV block {block_id} is not held by anyone"
        if self._hashes[block_id] is None and digest not in self._by_hash:
            self._hashes[block_id] = digest
            self._by_hash[digest] = block_id

    def lookup(self, digest: bytes) -> int | None:
        """The block that carries this content, held or free."""
        return self._by_hash.get(digest)

    def forget_contents(self) -> None:
        """No block can be found by content any more (the weights changed, or the memory was given away)."""
        self._blank.extend(self._evictable)
        self._evictable.clear()
        self._by_hash.clear()
        self._hashes = [None] * self._num_blocks

    def resize(self, num_blocks: int) -> None:
        """Another number of blocks, the scratch block counted. Content in those that go is forgotten.

        Raises ConfigError below two, OstinatoError when one that would go is held; nothing has changed then.
        """
        if num_blocks < 2:
            raise ConfigError(f"num_blocks={num_blocks}: must be at least 2, the scratch block and one to hand out")
        held = [block_id for block_id in range(num_blocks, self._num_blocks) if self._refs[block_id]]
        if held:
            raise OstinatoError(f"KV blocks {held[:8]} are in use: the pool cannot shrink to {num_blocks} blocks")
        for digest in self._hashes[num_blocks:]:
            if digest is not None:
                del self._by_hash[digest]
        for block_id in [block_id for block_id in self._evictable if block_id >= num_blocks]:
            del self._evictable[block_id]
        more = range(self._num_blocks, num_blocks)
        self._blank = [*reversed(more), *(block_id for block_id in self._blank if block_id < num_blocks)]
        self._refs = [*self._refs[:num_blocks], *(0 for _ in more)]
        self._hashes = [*self._hashes[:num_blocks], *(None for _ in more)]
        self._num_blocks = num_blocks

    def check_integrity(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Raise OstinatoError unless every block is free or held, never both, and findable blocks agree both ways.

        With `tables`, every reference must be accounted for by exactly one entry in one of them.
        """
        free = [*self._blank, *self._evictable]
        if sorted(free) != [b for b in range(1, self._num_blocks) if self._refs[b] == 0]:
            raise OstinatoError("the free list and the reference counts of the KV blocks disagree")
        if self._refs[SCRATCH_BLOCK] != 0:
            raise OstinatoError("the scratch block is held by a request")
        known = {block_id: digest for block_id, digest in enumerate(self._hashes) if digest is not None}
        if known != {block_id: digest for digest, block_id in self._by_hash.items()}:
            raise OstinatoError("the content hashes of the KV blocks disagree with their index")
        for block_id in free:
            if (block_id in known) != (block_id in self._evictable):
                raise OstinatoError(f"free KV block {block_id} is on the wrong free list for its content")
        if tables is None:
            return
        counts = Counter(block_id for table in tables for block_id in table)
        for block_id, refs in enumerate(self._refs):
            if refs != counts[block_id]:
                raise OstinatoError(
                    f"KV block {block_id} has {refs} references, {counts[block_id]} of them accounted for"
                )

    def _take_free(self) -> int:
        if self._blank:
            block_id = self._blank.pop()
        else:
            block_id, _ = self._evictable.popitem(last=False)
            digest = self._hashes[block_id]
            assert digest is not None
            del self._by_hash[digest]
            self._hashes[block_id] = None
            if self._on_evict is not None:
                self._on_evict(block_id, digest)
        self._refs[block_id] = 1
        return block_id
