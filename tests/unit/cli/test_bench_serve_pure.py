"""Load test of a server, the part without a network: what is sent when, what a stream says, what the numbers are."""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import json
import random
import statistics
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.cli.bench import serve, serve_plot
from ostinato.cli.bench.serve_drive import Clock, run_closed, run_jobs
from ostinato.cli.bench.serve_load import CHAT, COMPLETIONS, Job, Load, arrivals, make_jobs, make_warm_up
from ostinato.cli.bench.serve_stats import Outcome, most_in_flight, percentile, summarize
from ostinato.cli.bench.serve_stream import Chunk, EventParser, StreamError, error_message, read_chunk
from ostinato.errors import ConfigError

LOAD = Load(model="m", endpoint=COMPLETIONS, num_prompts=6, input_len=5, output_len=9)


# -- what is sent ------------------------------------------------------------------------------------------------------


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    times = arrivals(4001, 50.0, 3)
    gaps = [after - before for before, after in pairwise(times)]
    assert times[0] == 0.0
    assert min(gaps) > 0
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(1 / 50, rel=0.08)  # of an exponential law: the same as its mean
    assert times == arrivals(4001, 50.0, 3) != arrivals(4001, 50.0, 4)
    assert arrivals(3, float("inf"), 0) == [0.0, 0.0, 0.0]


def test_prompts_and_lengths_follow_from_the_seed_alone() -> None:
    load = dataclasses.replace(LOAD, range_ratio=0.5, num_prompts=200)
    jobs = make_jobs(load)
    slow = make_jobs(dataclasses.replace(load, request_rate=2.0))
    assert [job.body for job in slow] == [job.body for job in jobs]
    assert make_jobs(dataclasses.replace(load, seed=1))[0].body != jobs[0].body
    assert {job.output_len for job in jobs} == set(range(4, 15))  # 9 +- 4.5, rounded to even
    assert {len(job.body["prompt"].split()) for job in jobs} == set(range(2, 9))
    assert all(job.body["max_tokens"] == job.output_len for job in jobs)
    assert len({job.body["prompt"] for job in jobs}) > 190
    assert make_warm_up(load, 0).body["prompt"] not in {job.body["prompt"] for job in jobs}


def test_bodies() -> None:
    body = make_jobs(LOAD)[0].body
    assert body["stream"] and body["stream_options"] == {"include_usage": True} and body["ignore_eos"] is True
    ids = make_jobs(dataclasses.replace(LOAD, vocab_size=13, num_prompts=50, ignore_eos=False))
    assert {token for job in ids for token in job.body["prompt"]} == {10, 11, 12}
    assert "ignore_eos" not in ids[0].body
    assert {t for t in make_jobs(dataclasses.replace(LOAD, vocab_size=4))[0].body["prompt"]} == {3}
    chat = make_jobs(dataclasses.replace(LOAD, endpoint=CHAT, extra_body={"top_k": 3, "temperature": 1}))[0].body
    assert chat["messages"][0]["role"] == "user" and chat["max_completion_tokens"] == 9 and "prompt" not in chat
    assert (chat["top_k"], chat["temperature"]) == (3, 1)
    with pytest.raises(ConfigError, match="chat messages are text"):
        make_jobs(dataclasses.replace(LOAD, endpoint=CHAT, vocab_size=13))


class VirtualClock:
    """Time passes when everybody waits for it."""

    def __init__(self) -> None:
        self.time = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []
        self._count = 0

    def now(self) -> float:
        return self.time

    async def sleep_until(self, moment: float) -> None:
        event = asyncio.Event()
        self._count += 1
        heapq.heappush(self._sleepers, (moment, self._count, event))
        await event.wait()

    async def run(self, main: Any) -> Any:
        task = asyncio.ensure_future(main)
        while not task.done():
            for _ in range(20):  # every task that can go on does, as far as it can
                await asyncio.sleep(0)
            if not task.done():
                moment, _, event = heapq.heappop(self._sleepers)
                self.time = max(self.time, moment)
                event.set()
        return await task


def drive(dues: list[float], takes: float, cap: int | None) -> list[tuple[float, float]]:
    """(sent, ended) of requests that take the same time each."""
    clock = VirtualClock()
    seen: list[int] = []

    async def send(job: Job, clock: Clock) -> Outcome:
        sent = clock.now()
        await clock.sleep_until(sent + takes)
        return Outcome(job.index, job.due_s, sent, clock.now(), (clock.now(),), 1, 1)

    jobs = [Job(index, due, 1, {}) for index, due in enumerate(dues)]
    main = run_jobs(jobs, send, clock, cap, lambda outcome: seen.append(outcome.index))
    outcomes: list[Outcome] = asyncio.run(clock.run(main))
    assert [outcome.index for outcome in outcomes] == sorted(seen) == list(range(len(dues)))
    return [(outcome.sent_s, outcome.end_s) for outcome in outcomes]


def test_a_slow_server_does_not_slow_the_arrivals() -> None:
    assert drive([0.0, 1.0, 1.5], 10.0, None) == [(0.0, 10.0), (1.0, 11.0), (1.5, 11.5)]


def test_capped_requests_wait_their_turn_in_order() -> None:
    assert drive([0.0] * 5, 2.0, 2) == [(0.0, 2.0), (0.0, 2.0), (2.0, 4.0), (2.0, 4.0), (4.0, 6.0)]
    assert drive([0.0, 1.0, 7.0], 3.0, 1) == [(0.0, 3.0), (3.0, 6.0), (7.0, 10.0)]


def test_closed_loops_over_one_row_of_jobs_are_one_loop() -> None:
    """Requests take 7, 1, 2, 3, ... s: loops of 2 and 1 places send each when one loop of 3 places would."""
    takes = [7.0, 1.0, 2.0, 3.0, 1.0, 5.0, 2.0, 4.0]
    jobs = [Job(index, 0.0, 1, {}) for index in range(len(takes))]

    def schedule(*places: int) -> list[tuple[int, float, float]]:
        clock, row = VirtualClock(), iter(jobs)
        seen: list[Outcome] = []

        async def send(job: Job, clock: Clock) -> Outcome:
            sent = clock.now()
            await clock.sleep_until(sent + takes[job.index])
            return Outcome(job.index, job.due_s, sent, clock.now(), (clock.now(),), 1, 1)

        async def loops() -> None:
            await asyncio.gather(*(run_closed(lambda: next(row, None), send, clock, n, seen.append) for n in places))

        asyncio.run(clock.run(loops()))
        return sorted((outcome.index, outcome.sent_s, outcome.end_s) for outcome in seen)

    alone = schedule(3)
    assert [sent for _, sent, _ in alone] == [0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 6.0]
    assert schedule(2, 1) == alone
    assert schedule(2, 1, 9)[-1][1] == 0.0  # more places than jobs


# -- what a stream says ------------------------------------------------------------------------------------------------

EVENTS = (
    b"\xef\xbb\xbfdata: one\n\n: a comment\n\ndata:two\r\ndata:2\r\n\r\nevent: x\nid: 4\ndata: th\xc3\xa9\rdata:  ree\r"
    b"\rdatum: no\n\n\n\ndata\n\ndata: [DONE]\n\ndata: never ended"
)
DATA = ["one", "two\n2", "thé\n ree", "[DONE]"]


@given(st.lists(st.integers(0, len(EVENTS)), max_size=12))
def test_events_are_the_same_however_the_bytes_are_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(EVENTS)]
    parser = EventParser()
    parts = [EVENTS[start:end] for start, end in pairwise(edges)]
    assert [data for part in parts for data in parser.feed(part)] == DATA


def test_events_one_byte_at_a_time_come_when_they_are_complete() -> None:
    parser = EventParser()
    found = [(place, data) for place in range(len(EVENTS)) for data in parser.feed(EVENTS[place : place + 1])]
    assert found[0] == (EVENTS.index(b"one\n\n") + 4, "one")
    assert [data for _, data in found] == DATA


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"choices": [{"text": " a", "finish_reason": None}]}, Chunk(True, False)),
        ({"choices": [{"text": "", "finish_reason": None}]}, Chunk(True, False)),
        ({"choices": [{"text": "", "finish_reason": "stop"}]}, Chunk(False, True)),
        ({"choices": [{"text": "z", "finish_reason": "length"}]}, Chunk(True, True)),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, Chunk(False, False)),
        ({"choices": [{"delta": {"role": "assistant", "content": "a"}}]}, Chunk(True, False)),
        ({"choices": [{"delta": {"content": ""}}]}, Chunk(True, False)),
        ({"choices": [{"delta": {"reasoning_content": "hm"}}]}, Chunk(True, False)),
        ({"choices": [{"delta": {"tool_calls": [{}]}}]}, Chunk(True, False)),
        ({"choices": [{"delta": {}, "finish_reason": "stop"}]}, Chunk(False, True)),
        ({"choices": [{"delta": {"content": ""}, "finish_reason": "stop"}]}, Chunk(False, True)),
        ({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}, Chunk(False, False, 5, 7)),
        ({"choices": [], "usage": None}, Chunk(False, False)),
        ({"id": "x"}, Chunk(False, False)),
    ],
)
def test_chunks(body: dict[str, Any], expected: Chunk) -> None:
    assert read_chunk(json.dumps(body)) == expected


@pytest.mark.parametrize(
    ("data", "reason", "detail"),
    [
        ("{", "a chunk is not JSON", "{"),
        ("[]", "a chunk is not a JSON object", "[]"),
        ('{"error": {"message": "out of\\n  blocks", "code": 500}}', "error in the stream", "out of blocks"),
    ],
)
def test_chunks_that_are_errors(data: str, reason: str, detail: str) -> None:
    with pytest.raises(StreamError) as raised:
        read_chunk(data)
    assert (raised.value.reason, raised.value.detail) == (reason, detail)


def test_error_messages() -> None:
    assert error_message({"error": {"message": "no", "type": "x"}}) == "no"
    assert error_message({"detail": "Not Found"}) == "Not Found"
    assert error_message({"code": 3}) == '{"code": 3}'
    assert len(error_message("x" * 1000)) == 160


# -- what the numbers are ----------------------------------------------------------------------------------------------


def outcome(index: int, sent: float, times: tuple[float, ...], tokens: int | None = None, **fields: Any) -> Outcome:
    fields = {"due_s": sent, "end_s": times[-1] if times else sent, "prompt_tokens": 10} | fields
    return Outcome(
        index=index, sent_s=sent, output_times=times, output_tokens=len(times) if tokens is None else tokens, **fields
    )


def test_latencies_of_a_request() -> None:
    one = outcome(0, 1.0, (1.5, 1.75, 2.5), tokens=5)
    assert (one.ttft_s, one.e2el_s, one.tpot_s) == (0.5, 1.5, 0.25)  # two chunks brought four tokens
    assert one.itl_s() == [0.25, 0.75]
    assert outcome(0, 1.0, (1.5,)).tpot_s is None


def test_summary() -> None:
    outcomes = [outcome(0, 0.0, (1.0, 2.0)), outcome(1, 1.0, (4.0, 5.0, 9.0))]
    summary = summarize(outcomes)
    assert (summary["num_completed"], summary["duration_s"], summary["output_tokens"]) == (2, 9.0, 5)
    assert summary["output_tokens_per_s"] == pytest.approx(5 / 9)
    assert summary["total_tokens_per_s"] == pytest.approx(25 / 9)
    assert summary["requests_per_s"] == pytest.approx(2 / 9)
    assert summary["ttft_ms"] == {"mean": 2000, "median": 2000, "p90": 2800, "p99": 2980, "min": 1000, "max": 3000}
    assert summary["itl_ms"]["median"] == 1000
    assert summary["tpot_ms"]["max"] == 2500
    assert summary["e2el_ms"]["mean"] == 5000
    assert summary["failures"] == [] and summary["goodput"] is None


def test_a_failed_request_never_counts_as_fast() -> None:
    """It is there the moment it is sent and has even brought tokens: it changes no latency and adds no output."""
    good = [outcome(0, 0.0, (2.0, 3.0))]
    early = outcome(1, 0.0, (0.001, 0.002), failure="stream cut short", detail="after 2 chunks")
    refused = [outcome(index, 0.0, (), failure="HTTP 429", detail=f"busy {index}") for index in (2, 3)]
    limits = {"ttft": 5000.0, "tpot": 5000.0, "e2el": 5000.0}
    alone, all_of_them = summarize(good, limits), summarize([*good, early, *refused], limits)
    same = [name for name in alone if name.endswith(("_ms", "_per_s", "tokens"))]
    assert len(same) == 9
    assert {name: alone[name] for name in same} == {name: all_of_them[name] for name in same}
    assert all_of_them["failures"] == [
        {"reason": "HTTP 429", "count": 2, "first": "busy 2"},
        {"reason": "stream cut short", "count": 1, "first": "after 2 chunks"},
    ]
    assert (alone["goodput"]["share"], all_of_them["goodput"]["share"]) == (1.0, 0.25)


def test_goodput_needs_every_limit() -> None:
    outcomes = [outcome(0, 0.0, (1.0, 2.0)), outcome(1, 0.0, (2.0, 2.5)), outcome(2, 0.0, (0.5,))]
    assert summarize(outcomes, {"ttft": 1000})["goodput"]["num_good"] == 2
    assert summarize(outcomes, {"tpot": 500})["goodput"]["num_good"] == 2
    assert summarize(outcomes, {"ttft": 1000, "tpot": 500})["goodput"]["num_good"] == 1
    assert summarize(outcomes, {"e2el": 2000})["goodput"]["num_good"] == 2


def test_summary_of_failures_only_and_of_nothing() -> None:
    summary = summarize([outcome(0, 0.0, (), failure="timeout", end_s=3.0)], {"ttft": 1})
    assert summary["ttft_ms"] is None and summary["output_tokens_per_s"] == 0.0 and summary["goodput"]["num_good"] == 0
    assert summarize([])["num_requests"] == 0


def test_tokens_without_a_count_of_the_server() -> None:
    summary = summarize([outcome(0, 0.0, (1.0,)), outcome(1, 0.0, (1.0,), counted=False, prompt_tokens=None)])
    assert (summary["tokens_counted_by"], summary["prompt_tokens"], summary["total_tokens_per_s"]) == (
        "chunks",
        None,
        None,
    )


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0, 100))
def test_percentile(values: list[float], percent: float) -> None:
    np = pytest.importorskip("numpy")
    assert percentile(sorted(values), percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


def test_most_in_flight() -> None:
    assert most_in_flight([outcome(0, 0.0, (1.0,)), outcome(1, 1.0, (3.0,)), outcome(2, 2.0, (4.0,))]) == 2
    assert most_in_flight([outcome(index, 0.0, (1.0,)) for index in range(5)]) == 5
    assert most_in_flight([]) == 0


def test_rates_over_time_add_up_to_all_tokens() -> None:
    rng = random.Random(0)
    outcomes = [outcome(i, 0.0, tuple(sorted(rng.uniform(0, 4) for _ in range(7))), tokens=14) for i in range(9)]
    outcomes.append(outcome(9, 0.0, (4.0,), failure="timeout"))
    middles, rates = serve_plot.token_rates(outcomes, slices=8)
    assert middles == pytest.approx([0.25 + 0.5 * place for place in range(8)])
    assert sum(rates) * 0.5 == pytest.approx(9 * 14)
    assert serve_plot.open_requests(outcomes)[1][:11] == list(range(11))
    assert serve_plot.open_requests(outcomes)[1][-1] == 0


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("localhost:8000", "http://localhost:8000"),
        ("https://example.org/llm/v1", "https://example.org/llm"),
    ],
)
def test_base_url(text: str, url: str) -> None:
    assert serve.base_url(text) == url
