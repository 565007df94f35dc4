"""Tiles of a decode step whose rows fill the device: what the list of them holds, and how large they are. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "FIRST_TILE",
    "LAST_TILE",
    "TILE_ROWS",
    "VALID_SHIFT",
    "DecodeTiles",
    "TileConfig",
    "block_cells",
    "num_partial_floats",
    "require_cells",
    "smallest_tile",
    "tile_config",
    "tile_programs",
    "tile_unit",
]

TILE_ROWS: Final = 1 << 16
"""An entry of the list is a row, below this, and"""
VALID_SHIFT: Final = 16
"""how many positions of the tile exist, 0 to 255, from this bit on, and"""
FIRST_TILE: Final = 1 << 24
"""whether it is the row's first"""
LAST_TILE: Final = 1 << 25
"""or last one."""

_MAX_PROGRAMS_PER_SM: Final = 4


class DecodeTiles(NamedTuple):
    """A list of the tiles of a step's decoding rows (see `ops.plan_tiles`), and how it is divided."""

    starts: Tensor  # [>=R + 1]: each row's first tile, and behind the last row the number of all
    info: Tensor  # [N, 2]: what the numbers above say; the row's token
    cells: Tensor  # [N, U]: the cache's cells where the tile's runs of neighbours begin
    tile: int  # positions
    num_programs: int  # of each kv head
    block_cells: int  # of the cache that it is for, see `block_cells`


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How the list is cut, and how programs walk over it: a function of shapes and dtypes alone."""

    tile: int
    """Positions of a tile, a power of two."""
    num_stages: int
    """Of the compiler's pipeline: two for each tile on its way, one of them for its indices, and one."""
    num_warps: int
    programs_per_sm: int
    """That run at one time, by their shared memory and registers."""

    @property
    def max_registers(self) -> int | None:
        """Of a thread, where the compiler would take more than so many programs leave."""
        most = 64 * 1024 // (self.programs_per_sm * self.num_warps * 32)
        return most if most < 255 else None


def tile_config(head_size: int, element_size: int, cache_element_size: int) -> TileConfig:
    """Measured on an H200. A program has two tiles on their way, each of 32 KB or, for small heads, 16; two programs of
    a multiprocessor, or four, then keep its share of the memory busy, and leave places for a successor. A cache of one
    byte an element has to be converted, for which it takes longer tiles."""
    width = _next_power_of_2(head_size)
    if element_size == 2 and cache_element_size == 1:
        return TileConfig(128 if width <= 128 else 64, 5, 4, 2 if width <= 128 else 1)
    tile = min(max(16 * 1024 // (width * element_size), 16), 64)
    return TileConfig(tile, 5, 4, 4 if width * element_size <= 128 else 2)


def tile_unit(tile: int, block_size: int) -> int:
    """Positions that are neighbours in the cache as well; the list has the first one's cell."""
    return min(tile, block_size)


def block_cells(cache: Tensor) -> int:
    """From a cell of a cache [N, B, G, D] to the same one of the next block, in cells."""
    cells, rest = divmod(cache.stride(0), cache.stride(1))
    if rest:
        raise ValueError(f"a block's stride of {cache.stride(0)} is no multiple of a cell's, {cache.stride(1)}")
    return cells


def require_cells(tiles: DecodeTiles, cache: Tensor) -> None:
    """Raises ValueError where the list's cells are not those of this cache."""
    if tiles.block_cells != (found := block_cells(cache)):
        raise ValueError(f"the list of tiles is for blocks of {tiles.block_cells} cells, the cache has {found}")


def tile_programs(config: TileConfig, num_kv_heads: int, num_sms: int) -> int:
    """Programs of a kv head."""
    return max(config.programs_per_sm * num_sms // num_kv_heads, 1)


def num_partial_floats(num_heads: int, num_kv_heads: int, head_size: int, num_sms: int) -> int:
    """Of a workspace that is enough for any step: two places for each program, each an output and a log-sum-exp of the
    query heads. A step that splits its rows (`choose_num_splits`) makes fewer parts: up to 2 rounded up to 4 for each
    multiprocessor, for all kv heads together."""
    places = max(-(-2 * _MAX_PROGRAMS_PER_SM * num_sms // num_kv_heads), 2)
    return places * num_heads * (head_size + 1)


def smallest_tile(head_size: int, element_size: int) -> int:
    """Positions of the shortest tile that any format of the cache has: a list with room for these has room for all."""
    return min(tile_config(head_size, element_size, size).tile for size in (1, element_size))


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
