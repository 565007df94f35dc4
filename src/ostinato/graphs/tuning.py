"""From steps counted by live size to the two ladders of a mode. No torch."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from ostinato.errors import ConfigError
from ostinato.graphs.buckets import mixed_ladder, uniform_ladder
from ostinato.graphs.dispatch import LiveCount
from ostinato.graphs.ladder import Demand, best_ladders, coarse_size
from ostinato.graphs.mode import CUDAGraphMode, RuntimeMode

__all__ = ["TunedLadder", "Tuning", "interpolated", "tune"]


@dataclass(frozen=True, slots=True)
class TunedLadder:
    """`kind` is uniform, in requests, or mixed, in tokens. Where no step of it was counted, `sizes` is `default`."""

    kind: str
    demand: Demand
    default: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tuning:
    """One ladder for each kind of batch that the mode records."""

    ladders: tuple[TunedLadder, ...]

    @property
    def sizes(self) -> dict[str, list[int]]:
        """As the option `cudagraph_capture_sizes` takes it."""
        return {ladder.kind: list(ladder.sizes) for ladder in self.ladders}


def tune(
    counts: Iterable[LiveCount],
    mode: CUDAGraphMode,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    *,
    max_sizes: int | None = None,
    max_bytes: int | None = None,
    bytes_of: Callable[[str, int], int] | None = None,
    cover: bool = True,
) -> Tuning:
    """The ladders with the least padding for these steps, under one budget for both (`best_ladders`).

    By default as many sizes as the default ladders have; `bytes_of(kind, size)` is what a recording holds. A kind of
    which no step was counted keeps its default ladder, which the budget does not count. Sizes above 512 are rounded up
    as `coarse_size` does, and those above a limit are counted at the limit. Raises ConfigError where nothing was
    counted, for a mode that records nothing, and for a budget that is too small.
    """
    demands = _demands(counts, mode, max_num_seqs, max_num_batched_tokens)
    if not demands:
        raise ConfigError(f"mode {mode.value} records no sizes to choose")
    defaults = {"uniform": uniform_ladder(max_num_seqs), "mixed": mixed_ladder(max_num_batched_tokens)}
    seen = {
        kind: Demand(counted, limit, bytes_of=None if bytes_of is None else partial(bytes_of, kind))
        for kind, (counted, limit) in demands.items()
        if counted.total()
    }
    if not seen:
        raise ConfigError("no step was counted that a ladder could serve: run some traffic first")
    if max_sizes is None and max_bytes is None:
        max_sizes = sum(len(defaults[kind]) for kind in seen)
    best = best_ladders(list(seen.values()), max_sizes=max_sizes, max_bytes=max_bytes, cover=cover)
    chosen = defaults | dict(zip(seen, best, strict=True))
    return Tuning(
        tuple(
            TunedLadder(kind, seen.get(kind) or Demand({}, limit), defaults[kind], chosen[kind])
            for kind, (_, limit) in demands.items()
        )
    )


def _demands(
    counts: Iterable[LiveCount], mode: CUDAGraphMode, max_num_seqs: int, max_num_batched_tokens: int
) -> dict[str, tuple[Counter[int], int]]:
    """Steps by size, and the limit, of each kind that the mode records. Where it records no uniform batches the mixed
    ladder serves them."""
    found: dict[str, tuple[Counter[int], int]] = {}
    if mode.decode_mode() is RuntimeMode.FULL:
        found["uniform"] = Counter(), max_num_seqs
    if mode.mixed_mode() is not RuntimeMode.NONE:
        found["mixed"] = Counter(), max_num_batched_tokens
    for line in counts:
        if line.query_len is not None and "uniform" in found:
            kind, size = "uniform", line.size
        else:
            kind, size = "mixed", line.size * (line.query_len or 1)
        if kind in found:
            counted, limit = found[kind]
            counted[min(coarse_size(size), limit)] += line.count
    return found


def interpolated(points: Mapping[int, int]) -> Callable[[int], int]:
    """A function of sizes through these (size, bytes), straight between them and level beyond. At least one point."""
    sizes = sorted(points)

    def at(size: int) -> int:
        above = bisect_left(sizes, size)
        if above in (0, len(sizes)):
            return points[sizes[min(above, len(sizes) - 1)]]
        low, high = sizes[above - 1], sizes[above]
        return points[low] + (points[high] - points[low]) * (size - low) // (high - low)

    return at
