"""How many parts a decode step cuts each row's keys into. Pure: a function of the batch key, never of lengths."""

from __future__ import annotations

__all__ = ["MIN_PART_UNITS", "PART_ROWS", "PART_UNIT", "choose_num_splits", "decode_places", "extra_parts"]

PART_UNIT = 128
"""Tokens that the parts of a row are made of: whole tiles of every kernel."""
MIN_PART_UNITS = 2
"""Of a part at least: what a part costs beside its keys is then little."""
PART_ROWS = 1 << 16
"""In the list of parts an entry is the index of the part in its row times this, plus the row."""

# Two decode programs of a common head group and query length fit on one multiprocessor (shared memory, registers).
_PROGRAMS_PER_SM = 2
# Below this many blocks a part costs more in launch and merge than it saves in reading.
_MIN_BLOCKS_PER_SPLIT = 8
_MAX_SPLITS = 128
_GOOD_ENOUGH = 0.85
# Where rows fill the device its programs are small ones (`fused_config`).
_SMALL_PROGRAMS_PER_SM = 4
_PARTS_PER_PLACE = 3
_MAX_EXTRA_PARTS = 1024


def choose_num_splits(num_rows: int, num_kv_heads: int, max_blocks: int, num_sms: int) -> int:
    """The smallest number of splits that keeps the device about as busy as any number would.

    num_rows: rows of the batch key; num_kv_heads: G; max_blocks: blocks of the longest possible row (the width of the
    block table); num_sms: multiprocessors of the device. A step runs `num_rows * num_kv_heads * splits` equal
    programs in waves; the busy share is the number of waves over that number rounded up. The smallest count within
    15 % of the best share wins, since every further split is one more partial result to write and merge. When the
    rows alone fill the device, that is 1.

    Lengths play no part: a recording keeps its split count for life, and a program whose range is empty leaves at once.
    """
    if min(num_rows, num_kv_heads, max_blocks, num_sms) < 1:
        raise ValueError(
            "choose_num_splits needs positive counts, got "
            f"num_rows={num_rows}, num_kv_heads={num_kv_heads}, max_blocks={max_blocks}, num_sms={num_sms}"
        )
    places = num_sms * _PROGRAMS_PER_SM
    programs = num_rows * num_kv_heads
    limit = min(max(max_blocks // _MIN_BLOCKS_PER_SPLIT, 1), _MAX_SPLITS, -(-places // programs))
    shares = [_busy_share(programs * splits, places) for splits in range(1, limit + 1)]
    target = _GOOD_ENOUGH * max(shares)
    return next(index + 1 for index, share in enumerate(shares) if share >= target)


def decode_places(num_sms: int) -> int:
    """Programs of a decode step whose rows fill the device that run at one time."""
    return _SMALL_PROGRAMS_PER_SM * num_sms


def extra_parts(num_kv_heads: int, num_sms: int) -> int:
    """Parts beyond one for each row that a step with unlike rows is cut into, at most: enough that each place gets
    several, since the last ones to end keep the device busy in part for as long as one takes."""
    return min(max(_PARTS_PER_PLACE * decode_places(num_sms) // num_kv_heads, 1), _MAX_EXTRA_PARTS)


def _busy_share(programs: int, places: int) -> float:
    """The share of program places that are filled, averaged over the waves that `programs` need."""
    return programs / (-(-programs // places) * places)
