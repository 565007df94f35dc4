"""Loads that no step waits for: who waits, who goes on, and who holds which blocks until when."""

from __future__ import annotations

import random
from itertools import count
from typing import Any

import pytest
from fake_connector import FakeConnector
from fake_runner import Harness, make_request, solo_outputs

from ostinato.connectors.protocol import AsyncKVConnectorScheduler, KVConnectorScheduler
from ostinato.errors import OstinatoError
from ostinato.request import FinishReason, Request, RequestStatus
from ostinato.scheduler import scheduler as scheduler_module
from ostinato.step import StepPlan

PROMPT = [1 + place % 5 for place in range(17)]  # four blocks and a token
LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS


@pytest.fixture(autouse=True)
def small_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "MIN_ASYNC_TOKENS", 12)


def rows_of(plan: StepPlan | None) -> list[tuple[str, int, int]]:
    assert plan is not None
    return [(row.request_id, row.start, row.num_tokens) for row in plan.rows]


def make(connector: FakeConnector, **options: Any) -> Harness:
    """Host memory holds the blocks of PROMPT, the pool nothing."""
    harness = Harness(**{"num_blocks": 24, "max_model_len": 40, "connector": connector, **options})
    harness.add(make_request("first", PROMPT, max_tokens=1, ignore_eos=True))
    harness.run()
    for digest, block_id in list(harness.scheduler.kv._pool._by_hash.items()):
        connector.host[digest] = [harness.runner.cells[block_id, place] for place in range(4)]
    harness.scheduler.kv.forget_contents()
    return harness


def decoding(harness: Harness, name: str = "other", max_tokens: int = 20) -> Request:
    """A request that is past its prompt."""
    request = harness.add(make_request(name, [6, 6], max_tokens=max_tokens, ignore_eos=True))
    harness.step()
    assert request.status is RequestStatus.RUNNING
    return request


def loading(harness: Harness, name: str = "late", **params: Any) -> Request:
    request = harness.add(make_request(name, PROMPT, **{"max_tokens": 4, "ignore_eos": True, **params}))
    harness.step()
    assert request.status is LOADING
    return request


def check(harness: Harness, *requests: Request) -> None:
    harness.run()
    for request in requests:
        assert request.output_token_ids == solo_outputs(request, harness.max_model_len, harness.vocab_size)


class TestTheChoice:
    def test_alone_a_request_loads_with_its_step(self) -> None:
        connector = FakeConnector()
        harness = make(connector)
        request = harness.add(make_request("a", PROMPT, max_tokens=3, ignore_eos=True))
        assert rows_of(harness.launch()) == [("a", 16, 1)]
        check(harness, request)
        assert (connector.num_sync, connector.num_async) == (1, 0)

    def test_beside_others_it_loads_without_one(self) -> None:
        connector = FakeConnector()
        harness = make(connector)
        other = decoding(harness)
        late = harness.add(make_request("late", PROMPT, max_tokens=4, ignore_eos=True))
        assert rows_of(harness.launch()) == [("other", 2, 1)]
        assert late.status is LOADING and late.slot is None
        assert (harness.scheduler.num_running, harness.scheduler.num_waiting, harness.scheduler.num_loading) == (
            1,
            1,
            1,
        )
        check(harness, other, late)
        assert (connector.num_sync, connector.num_async) == (0, 1)
        assert late.num_cached_tokens == 16

    def test_a_small_load_is_the_step_s(self) -> None:
        connector = FakeConnector()
        harness = make(connector)
        other = decoding(harness)
        late = harness.add(make_request("late", PROMPT[:9], max_tokens=4, ignore_eos=True))
        assert rows_of(harness.launch()) == [("other", 2, 1), ("late", 8, 1)]
        check(harness, other, late)
        assert (connector.num_sync, connector.num_async) == (1, 0)

    @pytest.mark.parametrize("load_kv_async", [False, True])
    def test_the_connector_may_insist(self, load_kv_async: bool) -> None:
        connector = FakeConnector(load_kv_async=load_kv_async)
        harness = make(connector)
        alone = harness.add(make_request("a", PROMPT, max_tokens=3, ignore_eos=True))
        assert (harness.launch() is None) == load_kv_async
        check(harness, alone)
        assert (connector.num_sync, connector.num_async) == (int(not load_kv_async), int(load_kv_async))

    def test_one_that_cannot_is_not_asked_to(self) -> None:
        """With the older signatures: an answer is a number, and nothing else is called."""

        class Plain:
            def __init__(self, inner: FakeConnector) -> None:
                self._inner = inner
                for name in ("cells", "host", "build_connector_meta", "start", "check_apart", "failed", "get_finished"):
                    setattr(self, name, getattr(inner, name))
                for name in ("block_evicted", "blocks_computed", "update_connector_output", "request_finished"):
                    setattr(self, name, getattr(inner, name))

            def get_num_new_matched_tokens(self, *arguments: Any) -> int:
                matched: Any = self._inner.get_num_new_matched_tokens(*arguments)
                return int(matched[0])

            def update_state_after_alloc(self, request: Request, block_ids: Any, computed: int, external: int) -> None:
                self._inner.update_state_after_alloc(request, block_ids, computed, external)

        inner = FakeConnector(load_kv_async=True)
        plain: Any = Plain(inner)
        assert not isinstance(plain, AsyncKVConnectorScheduler)
        harness = make(plain)
        inner.cells = harness.runner.cells
        other = decoding(harness)
        late = harness.add(make_request("late", PROMPT, max_tokens=4, ignore_eos=True))
        assert rows_of(harness.launch()) == [("other", 2, 1), ("late", 16, 1)]
        check(harness, other, late)


class TestWhileItLoads:
    def test_others_go_on_and_pass(self) -> None:
        """The one behind it is admitted, each step has every decoding row, and when it is there it goes first."""
        connector = FakeConnector(delay=lambda: 3)
        harness = make(connector, max_num_seqs=3)
        other = decoding(harness)
        late = loading(harness)
        behind = harness.add(make_request("behind", [5, 5, 5], max_tokens=9, ignore_eos=True))
        last = harness.add(make_request("last", [4, 4], max_tokens=3, ignore_eos=True))
        assert rows_of(harness.launch()) == [("other", 3, 1), ("behind", 0, 3)]
        assert last.status is RequestStatus.WAITING, "the row that is left is the loading request's"
        harness.collect()
        assert late.status is LOADING
        assert rows_of(harness.launch()) == [("other", 4, 1), ("behind", 3, 1)]
        harness.collect()
        assert rows_of(harness.launch()) == [("other", 5, 1), ("behind", 4, 1), ("late", 16, 1)]
        check(harness, other, late, behind, last)

    def test_what_is_loaded_is_found_when_it_is_there(self) -> None:
        connector = FakeConnector(delay=lambda: 3)
        harness = make(connector)
        other, late = decoding(harness), loading(harness)
        harness.step()
        twin = make_request("twin", PROMPT)
        assert harness.scheduler.kv.match(twin).num_tokens == 0
        while late.status is LOADING:
            harness.step()
        assert harness.scheduler.kv.match(twin).num_tokens == 16
        check(harness, other, late)

    def test_alone_it_is_waited_for(self) -> None:
        connector = FakeConnector(load_kv_async=True, delay=lambda: 5)
        harness = make(connector)
        late = harness.add(make_request("late", PROMPT, max_tokens=1))
        for _ in range(5):
            assert harness.launch() is None
            assert harness.scheduler.has_unfinished and harness.scheduler.is_loading
            harness.poll()
        assert not harness.scheduler.is_loading
        assert rows_of(harness.launch()) == [("late", 16, 1)]
        check(harness, late)

    @pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.STOP, FinishReason.ERROR])
    def test_its_end_does_not_free_blocks_that_are_written_to(self, reason: FinishReason) -> None:
        connector = FakeConnector(delay=lambda: 4)
        harness = make(connector)
        other, late = decoding(harness), loading(harness)
        free = harness.scheduler.kv.num_free
        harness.finish("late", reason)
        assert late.finished and harness.scheduler.get("late") is None
        assert harness.scheduler.is_loading and harness.scheduler.kv.num_free == free
        again = loading(harness)  # the same name, while the copies for the first are under way
        while connector.under_way and connector.under_way[0].request is late:
            harness.step()
        assert again.status is LOADING
        check(harness, other, again)

    def test_an_ended_load_may_be_let_go_of_at_once(self) -> None:
        connector = FakeConnector(delay=lambda: 1)
        harness = make(connector, max_num_batched_tokens=1, max_num_seqs=1)
        late = harness.add(make_request("late", PROMPT, max_tokens=4, ignore_eos=True))
        connector.load_kv_async = True
        assert harness.launch() is None
        harness.poll()
        assert late.status is LOADING and not harness.scheduler.is_loading
        harness.finish("late", FinishReason.ABORT)
        harness.check_idle()

    def test_a_load_that_fails_is_computed(self) -> None:
        for num_bad in (1, 3, 4):
            connector = FakeConnector(num_bad=lambda n=num_bad: n)  # type: ignore[misc]
            harness = make(connector)
            other, late = decoding(harness), loading(harness)
            check(harness, other, late)
            assert late.num_cached_tokens == 16 - 4 * num_bad
            mine = [row for plan in harness.plans for row in rows_of(plan) if row[0] == "late"]
            assert mine[0][1] == 16 - 4 * num_bad

    @pytest.mark.parametrize("weights_changed", [False, True])
    def test_preempting_all_reaches_it(self, weights_changed: bool) -> None:
        """Also while it loads: what comes is of old weights, and goes nowhere."""
        connector = FakeConnector(delay=lambda: 3)
        harness = make(connector)
        other, late = decoding(harness), loading(harness)
        harness.runner.weights += weights_changed
        harness.scheduler.preempt_all(weights_changed=weights_changed)
        harness.watch.look()
        assert other.status is late.status is RequestStatus.PREEMPTED
        assert harness.scheduler.is_loading and not harness.scheduler.num_loading
        check(harness, other, late)

    def test_a_step_that_is_dropped_takes_the_load_along(self) -> None:
        connector = FakeConnector()
        harness = make(connector)
        other = decoding(harness)
        late = harness.add(make_request("late", PROMPT, max_tokens=4, ignore_eos=True))
        assert harness.plan_and_discard() == [other]
        assert late.status is LOADING
        check(harness, late)
        assert late.num_cached_tokens == 0

    def test_rows_and_pool_of_other_sizes(self) -> None:
        connector = FakeConnector(delay=lambda: 3)
        harness = make(connector)
        other, late = decoding(harness), loading(harness)
        harness.resize_rows(1, 8)
        num_blocks = max(harness.scheduler.kv.table("late")[:-1])
        with pytest.raises(OstinatoError, match="are in use"):
            harness.scheduler.resize_pool(num_blocks)
        harness.watch.look()
        assert late.status is RequestStatus.PREEMPTED
        while harness.scheduler.is_loading:
            harness.poll()
        harness.resize_pool(12)
        check(harness, other, late)

    def test_short_of_blocks_it_is_the_first_to_give_its_up(self) -> None:
        """They come once the copies are done; the older row loses a step's turn, and not its KV."""
        connector = FakeConnector(delay=lambda: 25)
        harness = make(connector, num_blocks=11)
        other = decoding(harness, max_tokens=37)
        for _ in range(7):
            harness.step()
        late = loading(harness, max_tokens=2)
        while late.status is LOADING:
            harness.step()
        assert late.status is RequestStatus.PREEMPTED and harness.scheduler.is_loading
        assert harness.launch() is None, "no block is free before the copies are done"
        check(harness, other, late)
        assert other.num_preemptions == 0


def test_the_protocol_is_the_fake_s() -> None:
    """So that what is tested is what connectors are held to."""
    connector: KVConnectorScheduler = FakeConnector()
    assert isinstance(connector, AsyncKVConnectorScheduler)


def test_what_a_row_of_one_token_loads_is_found_at_once() -> None:
    connector = FakeConnector(load_kv_async=False)
    harness = make(connector)
    harness.add(make_request("a", PROMPT, max_tokens=1))
    harness.run()
    assert harness.scheduler.kv.match(make_request("b", PROMPT)).num_tokens == 16
    harness.add(make_request("b", PROMPT, max_tokens=1))
    harness.run()
    assert connector.num_sync == 1


@pytest.mark.parametrize("load_kv_async", [None, True])
@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [18, 40])
def test_many_requests(num_blocks: int, max_in_flight: int, load_kv_async: bool | None) -> None:
    """Shared beginnings, late and broken loads, ends, other weights, dropped steps: each output as if served alone."""
    chance = random.Random(f"{num_blocks} {max_in_flight} {load_kv_async}")
    connector = FakeConnector(
        load_kv_async=load_kv_async,
        delay=lambda: chance.choice([1, 2, 3, 8]),
        num_bad=lambda: chance.choice([0, 0, 0, 1, 9]),
    )
    harness = Harness(
        num_blocks=num_blocks,
        max_num_batched_tokens=20,
        max_model_len=56,
        max_in_flight=max_in_flight,
        vocab_size=25,
        connector=connector,
    )
    ids, requests = count(), list[Request]()
    heads = [[chance.randrange(1, 25) for _ in range(24)] for _ in range(4)]
    num_dropped = 0
    for turn in range(700):
        unfinished = [request for request in requests if not request.finished]
        if len(unfinished) < 3 or (len(unfinished) < 8 and chance.random() < 0.3):
            prompt = chance.choice(heads)[: chance.randrange(25)]
            prompt = [*prompt, *(chance.randrange(1, 25) for _ in range(chance.randrange(1, 8)))]
            request = make_request(
                f"r{next(ids)}", prompt, priority=chance.choice([0, 0, 1]), max_tokens=chance.choice([1, 5, 25])
            )
            requests.append(harness.add(request))
        at_loading = [request for request in unfinished if request.status is LOADING]
        if at_loading and chance.random() < 0.1:
            harness.finish(chance.choice(at_loading).request_id, FinishReason.ABORT)
        elif unfinished and chance.random() < 0.01:
            harness.finish(chance.choice(unfinished).request_id, FinishReason.ABORT)
        if turn % 100 == 99:
            while harness.runner.launched:
                harness.collect()
            harness.runner.weights += turn % 200 == 199
            harness.scheduler.preempt_all(weights_changed=turn % 200 == 199)
            harness.watch.look()
        if at_loading and chance.random() < 0.05:
            num_dropped += len(harness.plan_and_discard())
        harness.step()
    harness.run()
    assert connector.num_async > 10 and num_dropped > 0 and connector.failed
    assert num_blocks > 18 or harness.scheduler.preemptions > 10
    for request in requests:
        alone = solo_outputs(request, harness.max_model_len, harness.vocab_size)
        ended = request.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
        assert request.output_token_ids == (alone[: len(request.output_token_ids)] if ended else alone)
