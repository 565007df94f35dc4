import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.errors import ConfigError
from ostinato.graphs.buckets import mixed_ladder, uniform_ladder, worst_padding
from ostinato.graphs.mode import CUDAGraphMode, RuntimeMode

N, P, F = RuntimeMode.NONE, RuntimeMode.PIECEWISE, RuntimeMode.FULL


@pytest.mark.parametrize(
    ("name", "decode", "mixed"),
    [
        ("NONE", N, N),
        ("PIECEWISE", P, P),
        ("FULL", F, F),
        ("FULL_DECODE_ONLY", F, N),
        ("FULL_AND_PIECEWISE", F, P),
    ],
)
def test_mode_table(name: str, decode: RuntimeMode, mixed: RuntimeMode) -> None:
    mode = CUDAGraphMode.parse(name)
    assert (mode.decode_mode(), mode.mixed_mode()) == (decode, mixed)
    assert {kind for kind in RuntimeMode if mode.needs(kind)} == {decode, mixed}


def test_mode_parse_takes_any_case_and_dashes() -> None:
    assert CUDAGraphMode.parse(" full-and-piecewise ") is CUDAGraphMode.FULL_AND_PIECEWISE
    assert CUDAGraphMode.parse(CUDAGraphMode.FULL) is CUDAGraphMode.FULL


def test_mode_parse_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean PIECEWISE"):
        CUDAGraphMode.parse("peicewise")
    with pytest.raises(ConfigError, match=r"Choose one of NONE, .*FULL_DECODE_ONLY"):
        CUDAGraphMode.parse("zzz")


def test_default_ladders() -> None:
    assert uniform_ladder(1) == (1,)
    assert uniform_ladder(7) == (1, 2, 4, 7)
    assert uniform_ladder(33) == (1, 2, 4, 8, 16, 24, 32, 33)
    assert uniform_ladder(300)[-4:] == (256, 272, 288, 300)
    assert len(uniform_ladder(256)) == 35
    assert mixed_ladder(512) == uniform_ladder(512)
    assert mixed_ladder(700)[-5:] == (496, 512, 576, 640, 700)


@given(st.integers(1, 5000))
def test_ladders_rise_and_end_at_the_limit(limit: int) -> None:
    for ladder in (uniform_ladder(limit), mixed_ladder(limit)):
        assert list(ladder) == sorted(set(ladder))
        assert ladder[0] == 1
        assert ladder[-1] == limit


@given(st.lists(st.integers(1, 64), min_size=1), st.integers(64, 200))
def test_user_list_is_kept_exactly(sizes: list[int], limit: int) -> None:
    assert uniform_ladder(limit, sizes) == mixed_ladder(limit, sizes) == tuple(sorted(set(sizes)))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [([], "empty"), ([0, 4], r"\[0\]"), ([True, 2], "True"), ([2.0], r"2\.0"), ([4, 9, 12, 9], r"\[9, 12\].* 8,")],
)
def test_user_list_is_refused_with_a_reason(sizes: list[int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        uniform_ladder(8, sizes)


def test_limit_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="got 0"):
        mixed_ladder(0)


@given(st.lists(st.integers(1, 300), min_size=1, unique=True))
def test_worst_padding_is_the_worst(sizes: list[int]) -> None:
    ladder = tuple(sorted(sizes))
    live, padded = worst_padding(ladder)
    factors = [next(size for size in ladder if size >= n) / n for n in range(1, ladder[-1] + 1)]
    assert padded / live == max(factors)
    assert next(size for size in ladder if size >= live) == padded


def test_worst_padding_of_the_default() -> None:
    assert worst_padding(uniform_ladder(256)) == (9, 16)
    with pytest.raises(ConfigError, match="empty ladder"):
        worst_padding(())
