"""Live sizes as steps are counted, and the ladders that become of them."""

from __future__ import annotations

import pytest

from ostinato.errors import ConfigError
from ostinato.graphs.buckets import mixed_ladder, uniform_ladder
from ostinato.graphs.dispatch import BatchShape, Decision, Dispatcher, LiveCount, Reason, StepCounters
from ostinato.graphs.mode import CUDAGraphMode, RuntimeMode
from ostinato.graphs.tuning import interpolated, tune

BOTH = CUDAGraphMode.FULL_AND_PIECEWISE


def test_live_sizes_are_counted_whatever_runs_them() -> None:
    counters = StepCounters()
    decode, prompts, alike = BatchShape(5, 5, 1), BatchShape(9, 3, None), BatchShape(12, 3, 4)
    for mode in ("FULL_AND_PIECEWISE", "PIECEWISE", "FULL_DECODE_ONLY", "NONE"):
        dispatcher = Dispatcher(CUDAGraphMode.parse(mode), (8,), (16,), 8)
        for shape in (decode, prompts, alike, decode):
            counters.record(dispatcher.pick(shape), shape)
    assert counters.live_sizes() == (LiveCount(None, 9, 4), LiveCount(None, 12, 4), LiveCount(1, 5, 8))


def test_a_step_that_sets_scales_is_not_counted() -> None:
    counters, shape = StepCounters(), BatchShape(5, 5, 1)
    counters.record(Decision(RuntimeMode.NONE, shape.as_key(), Reason.CALIBRATES_KV), shape)
    assert counters.live_sizes() == ()
    assert sum(step.count for step in counters.snapshot()) == 1


@pytest.mark.parametrize("mixed", [8, 64])
def test_decoding_with_a_connectors_hooks_counts_as_mixed(mixed: int) -> None:
    """Whether or not the mixed ladder has a key that fits."""
    counters, shape = StepCounters(), BatchShape(5, 5, 1)
    counters.record(Dispatcher(BOTH, (8,), (mixed,), 8).pick(shape, force_piecewise=True), shape)
    assert counters.live_sizes() == (LiveCount(None, 5, 1),)


COUNTS = [LiveCount(None, 300, 5), LiveCount(1, 7, 100), LiveCount(1, 33, 50)]


def test_both_ladders() -> None:
    tuning = tune(COUNTS, BOTH, 64, 512)
    uniform, mixed = tuning.ladders
    assert {7, 33, 64} <= set(uniform.sizes)
    assert {300, 512} <= set(mixed.sizes)
    assert (uniform.default, mixed.default) == (uniform_ladder(64), mixed_ladder(512))
    assert len(uniform.sizes) + len(mixed.sizes) <= len(uniform.default) + len(mixed.default)
    assert tuning.sizes == {"uniform": list(uniform.sizes), "mixed": list(mixed.sizes)}


def test_only_the_sizes_that_came() -> None:
    assert tune(COUNTS, BOTH, 64, 512, cover=False).sizes == {"uniform": [7, 33, 64], "mixed": [300, 512]}
    # 50 steps padded from 33 to 64 are 1,550; 5 from 300 to 512 1,060; 100 from 7 would be eager
    assert tune(COUNTS, BOTH, 64, 512, cover=False, max_sizes=4).sizes == {"uniform": [7, 33, 64], "mixed": [512]}
    assert tune(COUNTS, BOTH, 64, 512, cover=False, max_sizes=3).sizes == {"uniform": [7, 64], "mixed": [512]}


@pytest.mark.parametrize(
    ("mode", "sizes"),
    [
        (CUDAGraphMode.FULL, {"uniform": [7, 33, 64], "mixed": [300, 512]}),
        (CUDAGraphMode.PIECEWISE, {"mixed": [7, 33, 300, 512]}),
        (CUDAGraphMode.FULL_DECODE_ONLY, {"uniform": [7, 33, 64]}),
    ],
)
def test_modes(mode: CUDAGraphMode, sizes: dict[str, list[int]]) -> None:
    assert tune(COUNTS, mode, 64, 512, cover=False).sizes == sizes


def test_a_kind_that_never_came_keeps_its_default() -> None:
    tuning = tune(COUNTS[1:], BOTH, 64, 512, max_sizes=3, cover=False)
    assert tuning.sizes == {"uniform": [7, 33, 64], "mixed": list(mixed_ladder(512))}


def test_limits_that_have_become_lower() -> None:
    assert tune(COUNTS, BOTH, 16, 128, cover=False).sizes == {"uniform": [7, 16], "mixed": [128]}


def test_large_sizes_are_rounded_up() -> None:
    assert tune([LiveCount(None, 1030, 5)], BOTH, 64, 2048, cover=False).sizes["mixed"] == [1056, 2048]


def test_bytes() -> None:
    held = {"uniform": 1000, "mixed": 5000}
    found = tune(COUNTS, BOTH, 64, 512, max_bytes=8000, bytes_of=lambda kind, size: held[kind], cover=False).sizes
    assert found == {"uniform": [7, 33, 64], "mixed": [512]}


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="no step was counted"):
        tune([], BOTH, 64, 512)
    with pytest.raises(ConfigError, match="mode NONE records no sizes"):
        tune(COUNTS, CUDAGraphMode.NONE, 64, 512)
    with pytest.raises(ConfigError, match="no step was counted"):
        tune(COUNTS[:1], CUDAGraphMode.FULL_DECODE_ONLY, 64, 512)


def test_interpolation() -> None:
    at = interpolated({8: 100, 16: 300})
    assert [at(size) for size in (1, 8, 9, 12, 16, 99)] == [100, 100, 125, 200, 300, 300]
