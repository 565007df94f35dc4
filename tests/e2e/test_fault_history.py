"""A step that fails is told of in the log, with what was launched before it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from ostinato import LLM, SamplingParams

from .conftest import TinyFactory

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def llm(tiny_model: TinyFactory) -> Iterator[LLM]:
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "enable_prefix_caching": False}
    with LLM(str(tiny_model().path), device="cpu", cudagraph_capture_sizes=[2, 4, 32], **options) as made:
        yield made


def fail_at(llm: LLM, monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException, at: int) -> None:
    """The call number `at` of a method of the runner's raises."""
    run, count = getattr(llm.engine.runner, method), 0

    def failing(*args: object) -> object:
        nonlocal count
        count += 1
        if count == at:
            raise error
        return run(*args)

    monkeypatch.setattr(llm.engine.runner, method, failing)


@pytest.mark.parametrize(("method", "what"), [("_run", "launch"), ("_collect", "collect")])
def test_the_log_tells_what_was_launched(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str, what: str
) -> None:
    expected = llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    fault = RuntimeError("the device fell off")
    fail_at(llm, monkeypatch, method, fault, 3)
    with caplog.at_level(logging.ERROR, "ostinato"), pytest.raises(RuntimeError, match="fell off") as caught:
        llm.generate([PROMPT, PROMPT[:3]], GREEDY)
    monkeypatch.undo()
    assert caught.value is fault
    [note] = fault.__notes__
    assert note.startswith(f"in {what} of step ")
    [record] = caplog.records
    lines = record.getMessage().splitlines()
    assert lines[0].startswith(f"{what} of step ") and lines[0].endswith("failed: RuntimeError: the device fell off")
    steps = [line for line in lines if line.startswith("step ")]
    assert " PIECEWISE mixed:32 (mixed batch: piecewise), 2 rows, 19 tokens" in steps[-3]
    assert " FULL decode:2 (exact), 2 rows, 2 tokens" in steps[-1]
    first, second = lines[-2:]
    assert first.startswith("  row 0: request ") and ", start 17, 1 token, table of 2: " in first
    assert second.startswith("  row 1: request ") and ", start 4, 1 token, table of 1: " in second
    assert ", state row " in first
    # nothing was lost but that batch
    if method == "_collect":
        return
    assert llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids == expected
    assert llm.stats().free_blocks == llm.stats().num_blocks - 1


def test_ctrl_c_is_no_fault(llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fail_at(llm, monkeypatch, "_run", KeyboardInterrupt(), 2)
    with caplog.at_level(logging.ERROR, "ostinato"), pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT], GREEDY)
    assert not caplog.records
