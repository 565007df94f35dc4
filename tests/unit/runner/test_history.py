"""The newest launches as text, and what is known of tables that were begun before them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from ostinato.graphs.dispatch import BatchKey, Decision, Reason
from ostinato.graphs.mode import RuntimeMode
from ostinato.request import SamplingParams
from ostinato.runner.history import NUM_KEPT, LaunchHistory
from ostinato.step import Admission, RowPlan, StepPlan, TableAppend


def decision(num_rows: int) -> Decision:
    return Decision(RuntimeMode.FULL, BatchKey(num_rows, num_rows, 1), Reason.EXACT)


def admission(request_id: str, slot: int, block_ids: Sequence[int]) -> Admission:
    return Admission(request_id, slot, [1, 2], 2, 0, block_ids, SamplingParams(), frozenset(), 0)


def row(request_id: str, slot: int, start: int) -> RowPlan:
    return RowPlan(request_id, slot, start, 1, True)


def told(history: LaunchHistory, caplog: pytest.LogCaptureFixture, error: BaseException | None = None) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.ERROR, "ostinato"):
        history.report(error or RuntimeError("gone"), "collect", StepPlan(99, ()))
    return caplog.records[0].getMessage().splitlines()


def test_tables_as_they_were_at_each_launch(caplog: pytest.LogCaptureFixture) -> None:
    history, now = LaunchHistory(), {"old": [3, 4, 9, 10]}
    history.table_of = lambda request_id: now.get(request_id, ())
    for step, appends in enumerate([(), (TableAppend(2, 2, [9]),), (TableAppend(2, 3, [10]),)]):
        history.add(StepPlan(step, (row("old", 2, 31 + step),), appends=appends), decision(1))
    lines = told(history, caplog)
    assert lines[0] == "collect of step 99 failed: RuntimeError: gone"
    assert lines[2] == "step 0: FULL decode:1 (exact), 1 row, 1 token"
    rows = [line for line in lines if line.startswith("  row")]
    assert [line.split("1 token, ")[1] for line in rows] == [
        "table of 2: 3-4",
        "table of 3: 3-4 9",
        "table of 4: 3-4 9-10",
    ]
    assert rows[0].startswith("  row 0: request old, state row 2, start 31, ")


def test_a_table_begun_in_the_ring_needs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    history = LaunchHistory()
    history.add(StepPlan(0, (row("a", 1, 0),), admissions=(admission("a", 1, [5, 6]),)), decision(1))
    history.add(StepPlan(1, (row("a", 1, 1),), appends=(TableAppend(1, 2, [8]),)), decision(1))
    history.add(StepPlan(2, (row("b", 1, 0),), admissions=(admission("b", 1, [7]),)), decision(1))
    tables = [line.rpartition("table of ")[2] for line in told(history, caplog) if "table of" in line]
    assert tables == ["2: 5-6", "3: 5-6 8", "1: 7"]


def test_what_is_not_known_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A request that ended after an append; and one that was admitted again, whose table is another one now."""
    history, now = LaunchHistory(), {"again": [1, 2, 3]}
    history.table_of = lambda request_id: now.get(request_id, ())
    history.add(StepPlan(0, (row("ended", 0, 40), row("again", 1, 8)), appends=(TableAppend(0, 2, [6]),)), decision(2))
    history.add(StepPlan(1, (row("again", 3, 0),), admissions=(admission("again", 3, [1, 2, 3]),)), decision(1))
    rows = [line for line in told(history, caplog) if line.startswith("  row")]
    assert rows[0].endswith("table of 3: ? ? 6")
    assert rows[1].endswith("table no longer known")
    assert rows[2].endswith("table of 3: 1-3")


def test_only_the_newest_are_kept_and_each_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    history = LaunchHistory()
    for step in range(NUM_KEPT + 10):
        history.add(StepPlan(step, tuple(row(f"r{index}", index, step) for index in range(20))), decision(20))
    error = RuntimeError("gone")
    lines = told(history, caplog, error)
    steps = [line for line in lines if line.startswith("step")]
    assert len(steps) == NUM_KEPT
    assert (steps[0].split(":")[0], steps[-1].split(":")[0]) == ("step 10", f"step {NUM_KEPT + 9}")
    assert sum(line.startswith("  row") for line in lines) == (NUM_KEPT - 4) * 8 + 4 * 20
    assert "  and 12 rows more" in lines
    assert error.__notes__ == [
        f"in collect of step 99: the log has the newest launches ({NUM_KEPT} not told of before)"
    ]
    assert told(history, caplog)[1] == "0 launches not told of before, the latest last:"


def test_a_report_that_fails_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    history = LaunchHistory()

    def broken(request_id: str) -> Sequence[int]:
        raise KeyError(request_id)

    history.table_of = broken
    history.add(StepPlan(0, (row("a", 0, 3),)), decision(1))
    assert told(history, caplog)[-1] == "(they cannot be told: KeyError: 'a')"
