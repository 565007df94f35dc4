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
    "num_partial_floats",
    "tile_config",
    "tile_programs",
    "tile_size",
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

_TILE_BYTES: Final = 16 * 1024
"""Of a tile's keys, and as many of its values."""
_MAX_PROGRAMS_PER_SM: Final = 3


class DecodeTiles(NamedTuple):
    """A list of the tiles of a step's decoding rows (see `ops.plan_tiles`), and how it is divided."""

    starts: Tensor  # [>=R + 1]: each row's first tile, and behind the last row the number of all
    info: Tensor  # [N, 2]: what the numbers above say; the row's token
    cells: Tensor  # [N, U]: the cache's cells where the tile's runs of neighbours begin
    tile: int  # positions
    num_programs: int  # of each kv head


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How programs walk over the list: a function of shapes and dtypes alone."""

    num_stages: int
    """Of the compiler's pipeline: two for each tile on its way, one of them for its indices, and one."""
    num_warps: int
    programs_per_sm: int
    """That run at one time, by their shared memory."""


def tile_size(head_size: int, element_size: int) -> int:
    """Positions of a tile, a power of two; of the model's dtype, so that a change of the cache's keeps the list."""
    return min(max(_TILE_BYTES // (_next_power_of_2(head_size) * element_size), 16), 64)


def tile_config(head_size: int, element_size: int, cache_element_size: int) -> TileConfig:
    """Measured on an H200: two programs of a multiprocessor, each with two tiles of 32 KB on their way, or three with
    three of 16 KB, keep more of the memory busy than four with one, and leave places for a successor that starts
    early. From head size 128 on the registers are enough for two programs only."""
    head_pad = _next_power_of_2(head_size)
    num_bytes = tile_size(head_size, element_size) * head_pad * cache_element_size
    return TileConfig(7 if num_bytes <= _TILE_BYTES // 2 else 5, 4, 3 if head_pad <= 64 else 2)


def tile_unit(tile: int, block_size: int) -> int:
    """Positions that are neighbours in the cache as well; the list has the first one's cell."""
    return min(tile, block_size)


def tile_programs(config: TileConfig, num_kv_heads: int, num_sms: int) -> int:
    """Programs of a kv head."""
    return max(config.programs_per_sm * num_sms // num_kv_heads, 1)


def num_partial_floats(num_heads: int, num_kv_heads: int, head_size: int, num_sms: int) -> int:
    """Of a workspace that is enough for any step: two places for each program, each an output and a log-sum-exp of the
    query heads. A step that splits its rows (`choose_num_splits`) makes fewer parts: up to 2 rounded up to 4 for each
    multiprocessor, for all kv heads together."""
    places = max(-(-2 * _MAX_PROGRAMS_PER_SM * num_sms // num_kv_heads), 2)
    return places * num_heads * (head_size + 1)


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
