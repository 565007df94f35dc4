"""Which recording serves a batch: the only place where that is decided. No torch.

`Dispatcher.pick` takes the shape of a batch and answers with a mode, a key and a reason. It is total (any shape gets
an answer) and deterministic (the shape and its arguments decide). The decision is a cascade: a uniform batch is offered
to the keys of its own query length first, then, like every mixed batch, to the mixed keys, and else it runs eagerly.
The reason is that of the first refusal, so it names the limit that sent the step to where it is.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ostinato.errors import ConfigError
from ostinato.graphs.mode import CUDAGraphMode, RuntimeMode

__all__ = ["BatchKey", "BatchShape", "Decision", "Dispatcher", "LiveCount", "Reason", "StepCount", "StepCounters"]


@dataclass(frozen=True, slots=True)
class BatchKey:
    """Everything that a host branch or a launch parameter inside a recording may depend on.

    `query_len` is the length that every row has, or None where rows differ. Keys are ordered by size, mixed first.
    """

    num_tokens: int
    num_rows: int
    query_len: int | None

    @property
    def name(self) -> str:
        """`decode:8` for 8 rows of one token, `decode:8x4` for 8 rows of four, `mixed:512` for 512 tokens."""
        if self.query_len is None:
            return f"mixed:{self.num_tokens}"
        return f"decode:{self.num_rows}" + (f"x{self.query_len}" if self.query_len != 1 else "")

    def __lt__(self, other: BatchKey) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[int, int, int]:
        return (self.num_tokens, self.num_rows, self.query_len or 0)


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The live size of a batch: its tokens, its rows, and their query length if all have the same."""

    num_tokens: int
    num_rows: int
    query_len: int | None

    def as_key(self) -> BatchKey:
        return BatchKey(self.num_tokens, self.num_rows, self.query_len)


class Reason(enum.StrEnum):
    """Why a step runs as it does: the first limit it met, or how well its key fits."""

    EXACT = "exact"
    PADDED = "padded"
    GRAPHS_OFF = "graphs are off"
    MIXED_PIECEWISE = "mixed batch: piecewise"
    MIXED_EAGER = "mixed batch: no graph in this mode"
    TOO_MANY_ROWS = "more rows than the largest recorded batch"
    TOO_MANY_TOKENS = "more tokens than the largest recorded batch"
    TOO_MUCH_PADDING = "padding would more than double the work"  # double by default: `max_padding_factor`
    QUERY_LEN_NOT_RECORDED = "query length not recorded"
    NOT_RECORDED = "not recorded"
    NEEDS_HOST_WORK = "needs host work"
    CALIBRATES_KV = "sets the scales of the KV cache"


@dataclass(frozen=True, slots=True)
class Decision:
    """Run as `mode` at the padded size `key`; for NONE the key is the live shape itself."""

    mode: RuntimeMode
    key: BatchKey
    reason: Reason


@dataclass(frozen=True, slots=True)
class _Ladder:
    """Keys of one kind, ascending. `refusal` is the reason of a batch above the last one."""

    mode: RuntimeMode
    keys: tuple[BatchKey, ...]
    refusal: Reason

    def fit(
        self, shape: BatchShape, factor: float, available: Collection[tuple[RuntimeMode, BatchKey]] | None
    ) -> BatchKey | Reason:
        """The smallest available key that holds the shape, or why there is none."""
        refusal = self.refusal
        start = bisect_left(self.keys, shape.num_tokens, key=lambda key: key.num_tokens)
        for key in self.keys[start:]:
            if key.num_rows < shape.num_rows:
                refusal = Reason.TOO_MANY_ROWS
            elif available is not None and (self.mode, key) not in available:
                refusal = Reason.NOT_RECORDED
            elif key.num_tokens > factor * shape.num_tokens:
                # Larger keys only pad more. If the fitting one is merely not recorded yet, that is the cause to name.
                return refusal if refusal is Reason.NOT_RECORDED else Reason.TOO_MUCH_PADDING
            else:
                return key
        return refusal


class Dispatcher:
    """Decides for each batch which recording serves it, over fixed ladders of keys.

    `uniform_sizes` count rows (times each of `query_lens` in tokens), `mixed_sizes` count tokens. A key more than
    `max_padding_factor` times the live tokens is not used: running eagerly costs less. Where `max_num_tokens` is given,
    uniform keys are clamped to it: `max_num_tokens // query_len` rows is then the largest. Raises ConfigError for sizes
    that no batch can have.
    """

    def __init__(
        self,
        mode: CUDAGraphMode,
        uniform_sizes: Sequence[int],
        mixed_sizes: Sequence[int],
        max_num_seqs: int,
        query_lens: Sequence[int] = (1,),
        max_padding_factor: float = 2.0,
        *,
        max_num_tokens: int | None = None,
    ) -> None:
        if max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs={max_num_seqs}: must be at least 1")
        if not max_padding_factor >= 1.0:
            raise ConfigError(f"max_padding_factor={max_padding_factor}: must be at least 1 (inf for no limit)")
        if any(value < 1 for value in (*uniform_sizes, *mixed_sizes, *query_lens)):
            raise ConfigError("sizes and query lengths to record must be at least 1")
        if any(size > max_num_seqs for size in uniform_sizes):
            raise ConfigError(f"uniform sizes {max(uniform_sizes)} and below count rows: at most {max_num_seqs}")
        self.mode = mode
        self._factor = max_padding_factor
        self._largest_query_len = max(query_lens, default=0)
        mixed_keys = tuple(BatchKey(size, min(size, max_num_seqs), None) for size in sorted(set(mixed_sizes)))
        self._mixed = _Ladder(mode.mixed_mode(), mixed_keys, Reason.TOO_MANY_TOKENS)
        self._uniform = {
            query_len: _Ladder(
                RuntimeMode.FULL,
                tuple(BatchKey(rows * query_len, rows, query_len) for rows in rows_of),
                Reason.TOO_MANY_ROWS,
            )
            for query_len in query_lens
            if (rows_of := _clamp_rows(uniform_sizes, query_len, max_num_tokens))
        }

    def pick(
        self,
        shape: BatchShape,
        *,
        available: Collection[tuple[RuntimeMode, BatchKey]] | None = None,
        force_piecewise: bool = False,
        force_eager: bool = False,
    ) -> Decision:
        """How to run a batch of this shape.

        `available` restricts the choice to what has been recorded so far (None: everything in `keys()`).
        `force_piecewise` and `force_eager` are for steps with host work inside (a connector's hook in a layer, logprobs
        of a prompt): a whole graph would skip it.
        """
        if self.mode is CUDAGraphMode.NONE:
            return Decision(RuntimeMode.NONE, shape.as_key(), Reason.GRAPHS_OFF)
        if force_eager:
            return Decision(RuntimeMode.NONE, shape.as_key(), Reason.NEEDS_HOST_WORK)
        ladders, refusal = self._candidates(shape)
        for ladder in ladders:
            if ladder.mode is RuntimeMode.NONE:
                fit: BatchKey | Reason = Reason.MIXED_EAGER
            elif force_piecewise and ladder.mode is RuntimeMode.FULL:
                fit = Reason.NEEDS_HOST_WORK
            else:
                fit = ladder.fit(shape, self._factor, available)
            if isinstance(fit, BatchKey):
                return Decision(ladder.mode, fit, refusal or self._fit_reason(shape, ladder, fit))
            refusal = refusal or fit
        return Decision(RuntimeMode.NONE, shape.as_key(), refusal or Reason.NOT_RECORDED)

    def keys(self) -> list[tuple[RuntimeMode, BatchKey]]:
        """Everything to record, in recording order: PIECEWISE before FULL, the largest first."""
        ladders = [self._mixed]
        if self.mode.decode_mode() is RuntimeMode.FULL:
            ladders += self._uniform.values()
        found = [(ladder.mode, key) for ladder in ladders for key in ladder.keys if ladder.mode is not RuntimeMode.NONE]
        found.sort(key=lambda pair: pair[1], reverse=True)
        return sorted(found, key=lambda pair: pair[0] is RuntimeMode.FULL)

    def _candidates(self, shape: BatchShape) -> tuple[tuple[_Ladder, ...], Reason | None]:
        """The ladders to try in turn, and a reason that holds whatever key is found."""
        if self.mode.decode_mode() is not RuntimeMode.FULL:
            return (self._mixed,), None
        query_len = shape.query_len
        if query_len is None or shape.num_tokens != shape.num_rows * query_len:
            return (self._mixed,), None
        if query_len in self._uniform:
            return (self._uniform[query_len], self._mixed), None
        # Prompts of equal length are a mixed batch by chance; only a decode batch misses a query length.
        missed = query_len < self._largest_query_len
        return (self._mixed,), Reason.QUERY_LEN_NOT_RECORDED if missed else None

    def _fit_reason(self, shape: BatchShape, ladder: _Ladder, key: BatchKey) -> Reason:
        if ladder.mode is RuntimeMode.PIECEWISE and self.mode is CUDAGraphMode.FULL_AND_PIECEWISE:
            return Reason.MIXED_PIECEWISE
        return Reason.EXACT if key.num_tokens == shape.num_tokens else Reason.PADDED


def _clamp_rows(sizes: Iterable[int], query_len: int, max_num_tokens: int | None) -> list[int]:
    rows = sorted(set(sizes))
    if max_num_tokens is None or not rows:
        return rows
    most = max_num_tokens // query_len
    kept = {min(size, most) for size in rows if most > 0}
    return sorted(kept)


@dataclass(frozen=True, slots=True)
class StepCount:
    """Steps that ran as `mode` at `key` (None where eager) for `reason`.

    `padded_tokens` are the tokens they computed, padding included; `live_tokens` are those that were asked for.
    """

    mode: str
    key: BatchKey | None
    reason: str
    count: int
    live_tokens: int
    padded_tokens: int


@dataclass(frozen=True, slots=True)
class LiveCount:
    """Steps of one live size, whatever ran them: `size` rows of `query_len` tokens each, or, where `query_len` is None,
    `size` tokens in any mixture."""

    query_len: int | None
    size: int
    count: int


class StepCounters:
    """Counts steps by (mode, key, reason), so that a slow path can be seen, and by live size, for better ladders.

    `query_lens` are those of decode batches: other batches count as mixed, even where all rows have one length. The
    step that sets scales, which nothing recorded can serve, has no live size.
    """

    def __init__(self, query_lens: Iterable[int] = (1,)) -> None:
        self._counts: dict[tuple[RuntimeMode, BatchKey | None, Reason], tuple[int, int, int]] = {}
        self._live: dict[tuple[int | None, int], int] = {}
        self._query_lens = frozenset(query_lens)

    def record(self, decision: Decision, shape: BatchShape) -> None:
        eager = decision.mode is RuntimeMode.NONE
        index = (decision.mode, None if eager else decision.key, decision.reason)
        count, live, padded = self._counts.get(index, (0, 0, 0))
        self._counts[index] = (count + 1, live + shape.num_tokens, padded + decision.key.num_tokens)
        if decision.reason is Reason.CALIBRATES_KV:
            return
        # with host work inside, only a mixed key can serve a uniform batch
        uniform = shape.query_len in self._query_lens and decision.reason is not Reason.NEEDS_HOST_WORK
        size = (shape.query_len, shape.num_rows) if uniform else (None, shape.num_tokens)
        self._live[size] = self._live.get(size, 0) + 1

    def live_sizes(self) -> tuple[LiveCount, ...]:
        """Steps by live size: mixed ones first, then by query length, ascending. At most one entry for each size that
        the scheduler makes."""
        found = sorted(self._live.items(), key=lambda item: (item[0][0] or 0, item[0][1]))
        return tuple(LiveCount(query_len, size, count) for (query_len, size), count in found)

    def snapshot(self) -> tuple[StepCount, ...]:
        """All counts so far, by mode, then key, then reason."""

        def order(row: StepCount) -> tuple[str, tuple[int, int, int], str]:
            key = row.key
            return row.mode, (key.num_tokens, key.num_rows, key.query_len or 0) if key else (0, 0, 0), row.reason

        rows = (
            StepCount(mode.value, key, reason.value, *numbers) for (mode, key, reason), numbers in self._counts.items()
        )
        return tuple(sorted(rows, key=order))
