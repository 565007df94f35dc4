"""The sizes that are recorded: ladders of batch sizes that end at the scheduler's own limit. No torch.

A ladder is an increasing tuple. Its last entry being the limit is what keeps a loaded engine on its graphs: with a
lower end the largest batches run slowly, so that batches grow, so that it never recovers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ostinato.errors import ConfigError

__all__ = ["mixed_ladder", "uniform_ladder", "worst_padding"]

_COARSE_FROM = 512


def uniform_ladder(limit: int, sizes: Iterable[int] | None = None) -> tuple[int, ...]:
    """Sizes, in rows, for batches whose rows all have the same query length.

    By default 1, 2, 4, then every 8 up to 256, then every 16, clamped to `limit` (the most rows the scheduler makes)
    and always ending in it. A list of the user's is sorted, freed of duplicates and kept exactly, even where it ends
    below `limit`: the caller warns of that. Raises ConfigError for an empty list or an entry outside 1..limit.
    """
    _check_limit(limit)
    if sizes is not None:
        return _user_ladder(sizes, limit)
    return _clamped([1, 2, 4, *range(8, 257, 8), *range(272, limit + 1, 16)], limit)


def mixed_ladder(limit: int, sizes: Iterable[int] | None = None) -> tuple[int, ...]:
    """Sizes, in tokens, for batches of any mixture; `limit` is the most tokens the scheduler puts into a step.

    As `uniform_ladder` up to 512 tokens, every 64 above: there a step is bound by arithmetic rather than by launches,
    at most 63 tokens (an eighth) are padding, and the number of recordings stays small.
    """
    _check_limit(limit)
    if sizes is not None:
        return _user_ladder(sizes, limit)
    fine = [1, 2, 4, *range(8, 257, 8), *range(272, _COARSE_FROM + 1, 16)]
    return _clamped([*fine, *range(_COARSE_FROM + 64, limit + 1, 64)], limit)


def worst_padding(ladder: Sequence[int]) -> tuple[int, int]:
    """The live size that pads by the largest factor, and what it is padded to; the smaller one of equals."""
    if not ladder:
        raise ConfigError("an empty ladder pads nothing: give it at least one size")
    gaps = zip((0, *ladder[:-1]), ladder, strict=True)
    return max(((below + 1, size) for below, size in gaps), key=lambda gap: gap[1] / gap[0])


def _clamped(sizes: list[int], limit: int) -> tuple[int, ...]:
    return (*(size for size in sizes if size < limit), limit)


def _check_limit(limit: int) -> None:
    if limit < 1:
        raise ConfigError(f"a ladder needs a limit of at least 1, got {limit}")


def _user_ladder(sizes: Iterable[int], limit: int) -> tuple[int, ...]:
    given = list(sizes)
    if not given:
        raise ConfigError("the list of sizes to record is empty: name at least one, or turn graphs off with mode NONE")
    wrong = [size for size in given if isinstance(size, bool) or not isinstance(size, int) or size < 1]
    if wrong:
        raise ConfigError(f"sizes to record must be whole numbers of at least 1, got {wrong}")
    above = sorted({size for size in given if size > limit})
    if above:
        raise ConfigError(
            f"sizes to record {above} lie above {limit}, the most that the scheduler puts into a step: "
            "no batch would use them. Leave them out or raise the scheduler's limit"
        )
    return tuple(sorted(set(given)))
