"""Kernel events split into steps, and the shares of kernels that overlap."""

from __future__ import annotations

import pytest

from ostinato.cli.bench.kernel_times import (
    KernelEvent,
    attribute,
    by_kind,
    by_layer,
    is_attention,
    sequence,
    split_steps,
    summary,
)
from ostinato.cli.bench.profile import _print

FIRST, LAST = "prepare_kernel", "advance_kernel"


def events(*kernels: tuple[str, float, float]) -> list[KernelEvent]:
    return [KernelEvent(*kernel) for kernel in kernels]


def one_step(start_us: float, *, layers: int = 2, slow: float = 0.0) -> list[KernelEvent]:
    """Prepare, one projection and one attention a layer, a head, advance: 2 us each, back to back."""
    names = [FIRST, *["linear_kernel", "decode_fused_kernel"] * layers, "head_kernel", LAST]
    found, at = [], start_us
    for name in names:
        length = 2.0 + (slow if name == "head_kernel" else 0.0)
        found.append(KernelEvent(name, at, length))
        at += length
    return found


def test_kernels_in_a_row_get_what_they_take() -> None:
    shares = attribute(events(("a", 10, 2), ("b", 12, 3), ("c", 15, 1)))
    assert [(share.name, share.attributed_us, share.raw_us) for share in shares] == [
        ("a", 2, 2),
        ("b", 3, 3),
        ("c", 1, 1),
    ]


def test_overlapping_kernels_add_up_to_the_step() -> None:
    """b starts inside a, and waits for it; c starts inside b."""
    shares = attribute(events(("a", 0, 10), ("b", 4, 9), ("c", 11, 6)))
    assert [share.attributed_us for share in shares] == [10, 3, 4]
    assert sum(share.attributed_us for share in shares) == 17
    assert [share.raw_us for share in shares] == [10, 9, 6]


def test_a_kernel_that_ends_inside_another_one() -> None:
    shares = attribute(events(("long", 0, 10), ("short", 2, 3), ("next", 10, 1)))
    assert [(share.name, share.attributed_us) for share in shares] == [("long", 5), ("short", 5), ("next", 1)]


def test_a_gap_counts_for_the_kernel_after_it() -> None:
    assert [share.attributed_us for share in attribute(events(("a", 0, 2), ("b", 5, 1)))] == [2, 4]
    assert attribute([]) == []


def test_steps_and_the_gaps_between_them() -> None:
    staged = events(("Memcpy HtoD (Pinned -> Device)", 17, 1.5), ("scatter_kernel", 19, 2))
    before = events(("head_kernel", -5, 1), (LAST, -3, 1))
    ran = [*before, *one_step(0), *staged, *one_step(24), *one_step(40)]
    steps = split_steps(list(reversed(ran)))
    assert len(steps) == 2  # the third may not be complete
    assert [len(step.kernels) for step in steps] == [7, 7]
    assert steps[0].duration_us == 14
    assert steps[0].kernels[0].name == FIRST
    assert steps[0].kernels[-1].name == LAST
    assert (steps[0].gap_us, steps[0].staged_us) == (10, 3.5)
    assert (steps[1].gap_us, steps[1].staged_us) == (2, 0)
    assert split_steps(before) == []


def test_by_kind_takes_medians_over_steps() -> None:
    ran = [*one_step(0), *one_step(100, slow=1), *one_step(200, slow=50), *one_step(400)]
    rows = {row["name"]: row for row in by_kind(split_steps(ran))}
    assert rows["head_kernel"]["attributed_us"] == 3
    assert rows["linear_kernel"] == {
        "name": "linear_kernel",
        "calls": 2,
        "attributed_us": 4,
        "raw_us": 4,
        "share": pytest.approx(4 / 15),
    }
    assert next(iter(rows)) in ("linear_kernel", "decode_fused_kernel")


def test_by_layer() -> None:
    steps = split_steps([*one_step(0, layers=4), *one_step(100, layers=4), *one_step(200, layers=4)])
    assert by_layer(steps, 4) == {"before_us": 4.0, "layers_us": [4.0, 4.0, 4.0], "after_us": 6.0}
    assert by_layer(steps, 2) == {"before_us": 4.0, "layers_us": [8.0], "after_us": 10.0}  # two kernels a layer
    assert by_layer(steps, 3) is None
    assert by_layer(steps, 4, begins=lambda name: False) is None
    assert by_layer([], 4) is None


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("decode_fused_kernel", True),
        ("decode_kernel", True),
        ("prefill_kernel", True),
        ("paged_attention_v2", True),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...> > >", True),
        ("flash::prepare_varlen_num_blocks_kernel", False),
        ("merge_kernel", False),
        ("combine_kernel", False),
        ("norm_linear_kernel", False),
    ],
)
def test_what_begins_the_attention_of_a_layer(name: str, begins: bool) -> None:
    assert is_attention(name) == begins


def test_sequence_of_what_most_steps_ran() -> None:
    odd = [event for event in one_step(100) if event.name != "head_kernel"]
    steps = split_steps([*one_step(0), *odd, *one_step(200), *one_step(300, slow=2), *one_step(400)])
    rows = sequence(steps)
    assert [row["name"] for row in rows] == [event.name for event in one_step(0)]
    assert rows[5] == {"name": "head_kernel", "attributed_us": 2.0, "raw_us": 2.0}
    assert sequence([]) == []


def test_summary() -> None:
    steps = split_steps([*one_step(0), *one_step(20), *one_step(40)])
    found = summary(steps, 2)
    assert (found["num_steps"], found["step_us"], found["gap_us"], found["staged_us"]) == (2, 14, 6, 0)
    assert sum(row["attributed_us"] for row in found["kinds"]) == 14
    assert sum(row["attributed_us"] for row in found["sequence"]) == 14
    layers = found["layers"]
    assert layers["before_us"] + sum(layers["layers_us"]) + layers["after_us"] == 14


def test_a_profile_is_printed_with_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    steps = split_steps([*one_step(0), *one_step(20), *one_step(40)])
    results = [{"batch": 1, "context": 9} | summary(steps, num_layers) for num_layers in (2, 3)]
    where = {"device": "cuda", "device_name": None, "torch": "2", "triton": "3"}
    model, engine = {"name": "tiny", "dtype": "float32"}, {"mode": "FULL"}
    _print({"environment": where, "model": model, "engine": engine, "results": results})
    lines = capsys.readouterr().out.splitlines()
    assert sum("14.0 us a step, then 6.0 us until the next one, 0.0 of them" in line for line in lines) == 2
    row = next(line.split() for line in lines if line.strip().startswith("linear_kernel"))
    assert row == ["linear_kernel", "2", "4.0", "4.0", "28.6%"]
    assert sum("4.0 / 4.0 / 4.0 us (min / median / max)" in line for line in lines) == 1
    assert sum("not as many for each layer" in line for line in lines) == 1
