"""How many parts a decode step cuts each row's keys into. Pure: a function of the batch key, never of lengths."""

from __future__ import annotations

__all__ = ["choose_num_splits"]

# Two decode programs of a common head group and query length fit on one multiprocessor (shared memory, registers).
_PROGRAMS_PER_SM = 2
# Below this many blocks a part costs more in launch and merge than it saves in reading.
_MIN_BLOCKS_PER_SPLIT = 8
_MAX_SPLITS = 128
_GOOD_ENOUGH = 0.85


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


def _busy_share(programs: int, places: int) -> float:
    """The share of program places that are filled, averaged over the waves that `programs` need."""
    return programs / (-(-programs // places) * places)
