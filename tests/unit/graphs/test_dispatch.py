import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import ConfigError
from ostinato.graphs.dispatch import BatchKey, BatchShape, Decision, Dispatcher, Reason, StepCounters
from ostinato.graphs.mode import CUDAGraphMode, RuntimeMode

N, P, F = RuntimeMode.NONE, RuntimeMode.PIECEWISE, RuntimeMode.FULL
UNIFORM, MIXED, MAX_SEQS = (1, 2, 4, 8), (1, 2, 4, 8, 16, 32), 16


def dispatcher(mode: str = "FULL_AND_PIECEWISE", **kwargs: object) -> Dispatcher:
    options = {"uniform_sizes": UNIFORM, "mixed_sizes": MIXED, "max_num_seqs": MAX_SEQS, **kwargs}
    return Dispatcher(CUDAGraphMode[mode], **options)  # type: ignore[arg-type]


def decode(rows: int, query_len: int = 1) -> BatchShape:
    return BatchShape(rows * query_len, rows, query_len)


@pytest.mark.parametrize(
    ("mode", "shape", "expected"),
    [
        ("NONE", decode(3), (N, BatchKey(3, 3, 1), Reason.GRAPHS_OFF)),
        ("PIECEWISE", decode(3), (P, BatchKey(4, 4, None), Reason.PADDED)),
        ("PIECEWISE", BatchShape(20, 3, None), (P, BatchKey(32, 16, None), Reason.PADDED)),
        ("PIECEWISE", BatchShape(16, 3, None), (P, BatchKey(16, 16, None), Reason.EXACT)),
        ("FULL", decode(4), (F, BatchKey(4, 4, 1), Reason.EXACT)),
        ("FULL", BatchShape(5, 2, None), (F, BatchKey(8, 8, None), Reason.PADDED)),
        ("FULL", decode(9), (F, BatchKey(16, 16, None), Reason.TOO_MANY_ROWS)),
        ("FULL_DECODE_ONLY", decode(5), (F, BatchKey(8, 8, 1), Reason.PADDED)),
        ("FULL_DECODE_ONLY", decode(9), (N, BatchKey(9, 9, 1), Reason.TOO_MANY_ROWS)),
        ("FULL_DECODE_ONLY", BatchShape(7, 3, None), (N, BatchKey(7, 3, None), Reason.MIXED_EAGER)),
        ("FULL_AND_PIECEWISE", decode(8), (F, BatchKey(8, 8, 1), Reason.EXACT)),
        ("FULL_AND_PIECEWISE", decode(9), (P, BatchKey(16, 16, None), Reason.TOO_MANY_ROWS)),
        ("FULL_AND_PIECEWISE", BatchShape(31, 3, None), (P, BatchKey(32, 16, None), Reason.MIXED_PIECEWISE)),
        ("FULL_AND_PIECEWISE", BatchShape(33, 3, None), (N, BatchKey(33, 3, None), Reason.TOO_MANY_TOKENS)),
        # prompts of equal length are a mixed batch
        ("FULL_AND_PIECEWISE", decode(2, 7), (P, BatchKey(16, 16, None), Reason.MIXED_PIECEWISE)),
        ("FULL_DECODE_ONLY", decode(1, 12), (N, BatchKey(12, 1, 12), Reason.MIXED_EAGER)),
    ],
)
def test_pick(mode: str, shape: BatchShape, expected: tuple[RuntimeMode, BatchKey, Reason]) -> None:
    assert dispatcher(mode).pick(shape) == Decision(*expected)


def test_padding_beyond_the_factor_goes_on_to_the_next_ladder() -> None:
    picky = dispatcher(uniform_sizes=(8,))
    assert picky.pick(decode(3)) == Decision(P, BatchKey(4, 4, None), Reason.TOO_MUCH_PADDING)
    picky = dispatcher("FULL_DECODE_ONLY", uniform_sizes=(8,))
    assert picky.pick(decode(3)) == Decision(N, BatchKey(3, 3, 1), Reason.TOO_MUCH_PADDING)
    assert picky.pick(decode(4)) == Decision(F, BatchKey(8, 8, 1), Reason.PADDED)
    generous = dispatcher("FULL_DECODE_ONLY", uniform_sizes=(8,), max_padding_factor=float("inf"))
    assert generous.pick(decode(1)).key == BatchKey(8, 8, 1)


def test_query_lens_have_their_own_keys() -> None:
    spec = dispatcher(query_lens=(1, 4))
    assert spec.pick(decode(3, 4)) == Decision(F, BatchKey(16, 4, 4), Reason.PADDED)
    assert spec.pick(decode(3, 2)) == Decision(P, BatchKey(8, 8, None), Reason.QUERY_LEN_NOT_RECORDED)
    assert spec.pick(decode(3, 9)).reason is Reason.MIXED_PIECEWISE


def test_token_limit_clamps_uniform_keys() -> None:
    keys = dispatcher("FULL_DECODE_ONLY", query_lens=(1, 5), max_num_tokens=16).keys()
    assert [key.num_rows for _, key in keys if key.query_len == 5] == [3, 2, 1]
    assert max(key.num_tokens for _, key in keys) <= 16


def test_host_work_keeps_a_step_out_of_whole_graphs() -> None:
    full = dispatcher()
    assert full.pick(decode(4), force_piecewise=True) == Decision(P, BatchKey(4, 4, None), Reason.NEEDS_HOST_WORK)
    assert full.pick(BatchShape(4, 2, None), force_piecewise=True).reason is Reason.MIXED_PIECEWISE
    assert full.pick(decode(4), force_eager=True) == Decision(N, BatchKey(4, 4, 1), Reason.NEEDS_HOST_WORK)
    for mode in ("FULL", "FULL_DECODE_ONLY"):
        assert dispatcher(mode).pick(decode(4), force_piecewise=True).mode is N


def test_only_what_is_available_is_picked() -> None:
    full = dispatcher()
    available = {(F, BatchKey(8, 8, 1)), (P, BatchKey(4, 4, None))}
    assert full.pick(decode(5), available=available) == Decision(F, BatchKey(8, 8, 1), Reason.PADDED)
    assert full.pick(decode(3), available=available) == Decision(P, BatchKey(4, 4, None), Reason.NOT_RECORDED)
    assert full.pick(decode(1), available=available) == Decision(N, BatchKey(1, 1, 1), Reason.NOT_RECORDED)
    assert full.pick(decode(4), available=set()).reason is Reason.NOT_RECORDED


def test_more_rows_than_any_key() -> None:
    few_rows = dispatcher(max_num_seqs=8)
    assert few_rows.pick(BatchShape(20, 9, None)) == Decision(N, BatchKey(20, 9, None), Reason.TOO_MANY_ROWS)


def test_keys_in_recording_order() -> None:
    keys = dispatcher().keys()
    assert keys[:2] == [(P, BatchKey(32, 16, None)), (P, BatchKey(16, 16, None))]
    assert keys[-4:] == [(F, BatchKey(n, n, 1)) for n in (8, 4, 2, 1)]
    assert len(keys) == len(set(keys)) == len(MIXED) + len(UNIFORM)
    assert dispatcher("NONE").keys() == []
    piecewise = dispatcher("PIECEWISE").keys()
    assert {mode for mode, _ in piecewise} == {P}


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_padding_factor": 0.5}, "max_padding_factor"),
        ({"mixed_sizes": (0, 1)}, "at least 1"),
        ({"uniform_sizes": (1, 99)}, "99"),
    ],
)
def test_impossible_ladders_are_refused(kwargs: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        dispatcher(**kwargs)


@st.composite
def shapes(draw: st.DrawFn) -> BatchShape:
    rows = draw(st.integers(1, 24))
    query_len = draw(st.none() | st.integers(1, 6))
    return BatchShape(rows * query_len if query_len else draw(st.integers(rows, 80)), rows, query_len)


sizes = st.lists(st.integers(1, 16), max_size=6).map(tuple)


@settings(max_examples=300, deadline=None)
@given(
    mode=st.sampled_from(CUDAGraphMode),
    uniform=sizes,
    mixed=sizes,
    query_lens=st.lists(st.integers(1, 4), max_size=3).map(tuple),
    factor=st.floats(1.0, 4.0),
    shape=shapes(),
    force_piecewise=st.booleans(),
    data=st.data(),
)
def test_pick_is_total_and_never_wrong(
    mode: CUDAGraphMode,
    uniform: tuple[int, ...],
    mixed: tuple[int, ...],
    query_lens: tuple[int, ...],
    factor: float,
    shape: BatchShape,
    force_piecewise: bool,
    data: st.DataObject,
) -> None:
    chooser = Dispatcher(mode, uniform, mixed, MAX_SEQS, query_lens, factor)
    keys = chooser.keys()
    available = set(data.draw(st.lists(st.sampled_from(keys)))) if keys and data.draw(st.booleans()) else None
    decision = chooser.pick(shape, available=available, force_piecewise=force_piecewise)
    assert decision == chooser.pick(shape, available=available, force_piecewise=force_piecewise)
    if decision.mode is N:
        assert decision.key == shape.as_key()
        assert decision.reason not in (Reason.EXACT, Reason.PADDED)
        return
    key = decision.key
    assert (decision.mode, key) in (keys if available is None else available)
    assert mode.needs(decision.mode)
    assert not (force_piecewise and decision.mode is F)
    assert key.num_tokens >= shape.num_tokens
    assert key.num_rows >= shape.num_rows
    assert key.num_tokens <= factor * shape.num_tokens
    assert key.query_len in (None, shape.query_len)
    assert (decision.reason is not Reason.EXACT) or key.num_tokens == shape.num_tokens
    smaller = [
        other
        for kind, other in (keys if available is None else available)
        if kind is decision.mode and other.query_len == key.query_len and other.num_tokens < key.num_tokens
    ]
    assert all(other.num_tokens < shape.num_tokens or other.num_rows < shape.num_rows for other in smaller)


def test_counters() -> None:
    chooser, counters = dispatcher(), StepCounters()
    for shape in (decode(3), decode(3), decode(4), BatchShape(40, 2, None), BatchShape(50, 2, None)):
        counters.record(chooser.pick(shape), shape)
    rows = [(r.mode, r.key, r.reason, r.count, r.live_tokens, r.padded_tokens) for r in counters.snapshot()]
    assert rows == [
        ("FULL", BatchKey(4, 4, 1), "exact", 1, 4, 4),
        ("FULL", BatchKey(4, 4, 1), "padded", 2, 6, 8),
        ("NONE", None, "more tokens than the largest recorded batch", 2, 90, 90),
    ]
    assert all(type(r.mode) is str and type(r.reason) is str for r in counters.snapshot())
