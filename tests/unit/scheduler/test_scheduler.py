from __future__ import annotations

import pytest
from fake_runner import Harness, make_request, solo_outputs

from ostinato.errors import CapacityError, ConfigError, OstinatoError
from ostinato.request import FinishReason, RequestStatus
from ostinato.scheduler import Scheduler
from ostinato.step import RowPlan, StepPlan, StepResult, TokenLogprobs


def rows_of(plan: StepPlan | None) -> list[tuple[str, int, int, bool]]:
    assert plan is not None
    return [(row.request_id, row.start, row.num_tokens, row.samples) for row in plan.rows]


def result_of(plan: StepPlan, token_id: int = 5) -> StepResult:
    return StepResult(tuple(token_id if row.samples else -1 for row in plan.rows))


class TestBudget:
    def test_prompts_are_cut_into_chunks_and_several_share_a_step(self) -> None:
        harness = Harness(num_blocks=40, max_num_batched_tokens=10, enable_prefix_caching=False)
        for name, num_tokens in (("a", 13), ("b", 4), ("c", 9)):
            harness.add(make_request(name, [1] * num_tokens, ignore_eos=True))
        assert rows_of(harness.launch()) == [("a", 0, 10, False)]
        harness.collect()
        assert rows_of(harness.launch()) == [("a", 10, 3, True), ("b", 0, 4, True), ("c", 0, 3, False)]
        harness.collect()
        assert rows_of(harness.launch()) == [("a", 13, 1, True), ("b", 4, 1, True), ("c", 3, 6, True)]

    def test_decoding_rows_run_beside_a_long_prompt_that_is_served_before_them(self) -> None:
        harness = Harness(num_blocks=60, max_num_batched_tokens=8, max_model_len=100)
        for name in ("a", "b", "c"):
            harness.add(make_request(name, [2, 3], ignore_eos=True, max_tokens=40))
        harness.step()
        harness.add(make_request("long", [1] * 40, priority=-1))
        harness.step()
        for start in range(5, 40, 5):
            plan = harness.launch()
            assert {row.request_id: row.num_tokens for row in plan.rows} == {"a": 1, "b": 1, "c": 1, "long": 5}
            assert rows_of(plan)[-1][1] == start
            harness.collect()

    def test_rows_are_in_the_order_of_slots_and_slots_are_stable(self) -> None:
        harness = Harness(num_blocks=60)
        for index, priority in enumerate((2, 0, 1)):
            harness.add(make_request(f"r{index}", [1, 2], priority=priority, ignore_eos=True, max_tokens=9))
        harness.step()
        before = [(row.request_id, row.slot) for row in harness.launch().rows]
        assert before == [("r1", 0), ("r2", 1), ("r0", 2)]
        harness.collect()
        harness.finish("r2", FinishReason.ABORT)
        harness.add(make_request("new", [3], ignore_eos=True))
        assert [(row.request_id, row.slot) for row in harness.launch().rows] == [("r1", 0), ("new", 1), ("r0", 2)]


class TestOverlap:
    def test_planned_from_counts_alone(self) -> None:
        harness = Harness(max_in_flight=3)
        request = harness.add(make_request("a", [1, 2, 3], ignore_eos=True, max_tokens=3))
        assert [rows_of(harness.launch()) for _ in range(3)] == [
            [("a", 0, 3, True)],
            [("a", 3, 1, True)],
            [("a", 4, 1, True)],
        ]
        assert (request.num_in_flight, len(request.tokens), request.num_computed) == (3, 3, 5)
        assert harness.launch() is None

    @pytest.mark.parametrize(("max_tokens", "max_model_len"), [(3, 48), (None, 6), (40, 6)])
    def test_never_past_the_end(self, max_tokens: int | None, max_model_len: int) -> None:
        harness = Harness(max_in_flight=9, max_model_len=max_model_len, num_blocks=3)
        request = harness.add(make_request("a", [1, 2, 3], ignore_eos=True, max_tokens=max_tokens))
        num_steps = 0
        while harness.launch():
            num_steps += 1
        assert num_steps == 3
        finished = [event.finished for _ in range(3) for event in harness.collect()]
        assert finished == [False, False, True]
        assert request.finish_reason is FinishReason.LENGTH and len(request.output_token_ids) == 3

    def test_tokens_after_a_late_stop_are_discarded(self) -> None:
        scheduler = Harness().scheduler
        request = make_request("a", [1, 2], max_tokens=9)
        scheduler.add(request)
        plans = [scheduler.plan() for _ in range(3)]
        assert [event.finished for event in scheduler.update(plans[0], result_of(plans[0], 5))] == [False]
        assert [event.finished for event in scheduler.update(plans[1], result_of(plans[1], 0))] == [True]
        assert not scheduler.has_unfinished
        assert scheduler.update(plans[2], result_of(plans[2], 6)) == []
        assert request.output_token_ids == [5, 0]
        assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, None)

    def test_an_explicit_stop_id_is_the_stop_reason(self) -> None:
        scheduler = Harness().scheduler
        request = make_request("a", [1, 2], stop_token_ids=[6])
        scheduler.add(request)
        plan = scheduler.plan()
        (event,) = scheduler.update(plan, result_of(plan, 6))
        assert event.finished and (request.finish_reason, request.stop_reason) == (FinishReason.STOP, 6)

    def test_an_id_may_be_used_again_while_its_last_owner_is_in_flight(self) -> None:
        harness = Harness(max_in_flight=2)
        old = harness.add(make_request("a", [1, 2], max_tokens=9, ignore_eos=True))
        harness.launch()
        harness.finish("a", FinishReason.ABORT)
        new = harness.add(make_request("a", [3, 4, 5], max_tokens=9, ignore_eos=True))
        harness.launch()
        assert harness.collect() == []
        assert [event.request for event in harness.collect()] == [new]
        assert old.output_token_ids == []

    def test_results_arrive_in_order_and_in_shape(self) -> None:
        scheduler = Harness().scheduler
        scheduler.add(make_request("a", [1, 2], ignore_eos=True))
        first, second = scheduler.plan(), scheduler.plan()
        with pytest.raises(OstinatoError, match="step 1 was collected out of order: step 0 is next"):
            scheduler.update(second, result_of(second))
        with pytest.raises(OstinatoError, match="step 0 has 1 rows, its result 2 tokens"):
            scheduler.update(first, StepResult((1, 2)))
        scheduler.update(first, result_of(first))
        scheduler.update(second, result_of(second))
        with pytest.raises(OstinatoError, match="no step is in flight"):
            scheduler.update(second, result_of(second))

    def test_log_probabilities_go_with_their_tokens(self) -> None:
        scheduler = Harness(max_num_batched_tokens=4).scheduler
        for name, num_tokens in (("a", 1), ("b", 2), ("c", 9)):
            scheduler.add(make_request(name, [1] * num_tokens))
        plan = scheduler.plan()
        entries = (TokenLogprobs(5, -0.1, 1, (), ()), TokenLogprobs(6, -0.2, 1, (), ()), None)
        events = scheduler.update(plan, StepResult((5, 6, -1), entries))
        assert [(e.request.request_id, e.token_id, e.logprobs) for e in events] == [
            ("a", 5, entries[0]),
            ("b", 6, entries[1]),
        ]


class TestFences:
    def test_blocks_and_rows_wait_for_the_newest_step(self) -> None:
        harness = Harness(num_blocks=4, max_num_seqs=1, max_in_flight=3, max_model_len=12)
        harness.add(make_request("a", [1] * 8, ignore_eos=True, max_tokens=4))
        harness.launch()
        harness.launch()
        harness.finish("a", FinishReason.ABORT)
        harness.add(make_request("b", [2] * 8))
        assert harness.scheduler.kv.num_free == 0
        assert harness.launch() is None
        harness.collect()
        assert harness.launch() is None
        harness.collect()
        assert harness.scheduler.kv.num_free == 3
        assert rows_of(harness.launch()) == [("b", 0, 8, True)]

    def test_with_nothing_in_flight_they_are_free_at_once(self) -> None:
        harness = Harness(num_blocks=4, max_num_seqs=1, max_model_len=12)
        harness.add(make_request("a", [1] * 8, ignore_eos=True, max_tokens=4))
        harness.step()
        harness.finish("a", FinishReason.ABORT)
        assert harness.scheduler.kv.num_free == 3
        harness.add(make_request("b", [2] * 8))
        assert rows_of(harness.launch()) == [("b", 0, 8, True)]


class TestPreemption:
    def pressed(self, max_in_flight: int = 1, priorities: tuple[int, ...] = (0, 0, 0)) -> Harness:
        """Three requests of 4 tokens that all fit, of which each will want two blocks more than there are."""
        harness = Harness(num_blocks=9, max_in_flight=max_in_flight, max_model_len=24, enable_prefix_caching=False)
        for index, priority in enumerate(priorities):
            prompt = [1 + index] * 4
            harness.add(make_request(f"r{index}", prompt, priority=priority, ignore_eos=True, max_tokens=12))
        return harness

    @pytest.mark.parametrize(("priorities", "victim"), [((0, 0, 0), "r2"), ((1, 0, 0), "r0"), ((0, 2, 1), "r1")])
    def test_the_worst_goes_first(self, priorities: tuple[int, ...], victim: str) -> None:
        harness = self.pressed(priorities=priorities)
        while not harness.scheduler.preemptions:
            harness.step()
        request = harness.scheduler.get(victim)
        assert request is not None and request.num_preemptions == 1
        assert request.status is RequestStatus.PREEMPTED and request.slot is None
        assert harness.scheduler.num_running == 2
        harness.run()

    @pytest.mark.parametrize("max_in_flight", [1, 2, 3])
    def test_outputs_are_those_of_a_roomy_pool(self, max_in_flight: int) -> None:
        harness = self.pressed(max_in_flight)
        requests = [harness.scheduler.get(f"r{index}") for index in range(3)]
        harness.run()
        assert harness.scheduler.preemptions >= 1
        for request in requests:
            assert request.output_token_ids == solo_outputs(request, 24, harness.vocab_size)

    def test_one_shortage_takes_one_victim_even_when_its_blocks_come_late(self) -> None:
        harness = Harness(num_blocks=9, max_in_flight=3, max_model_len=24, enable_prefix_caching=False)
        for index, num_prompt in enumerate((2, 4, 4)):  # the best is the last to want its third block
            harness.add(make_request(f"r{index}", [1 + index] * num_prompt, ignore_eos=True, max_tokens=12))
        while not harness.scheduler.preemptions:
            harness.launch() or harness.collect()
        last = harness.plans[-1]
        assert [row.request_id for row in last.rows] == ["r1"]  # r0 waits for what r2 held
        while harness.scheduler.num_running == 2 and harness.scheduler.num_steps_in_flight:
            harness.collect()
            harness.launch()
            assert harness.scheduler.preemptions == 1

    def test_samples_in_flight_are_kept(self) -> None:
        harness = Harness(num_blocks=20, max_in_flight=2)
        request = harness.add(make_request("a", [1, 2, 3], ignore_eos=True, max_tokens=4))
        harness.launch()
        harness.launch()
        harness.scheduler.preempt_all()
        harness.watch.look()
        assert (request.num_in_flight, request.num_computed) == (2, 0)
        assert harness.launch() is None  # there is room, but two of its tokens are not known yet
        harness.collect()
        assert harness.launch() is None
        harness.collect()
        plan = harness.launch()
        assert plan.admissions[0].token_ids == tuple(request.tokens) and len(request.tokens) == 5
        assert plan.admissions[0].num_prompt_tokens == 3
        assert plan.rows == (RowPlan("a", plan.admissions[0].slot, 0, 5, True),)
        harness.run()
        assert request.output_token_ids == solo_outputs(request, 48, harness.vocab_size)

    def test_a_preempted_request_may_end_before_it_comes_back(self) -> None:
        scheduler = Harness().scheduler
        request = make_request("a", [1, 2])
        scheduler.add(request)
        plan = scheduler.plan()
        scheduler.preempt_all()
        (event,) = scheduler.update(plan, result_of(plan, 0))
        assert event.finished and request.finish_reason is FinishReason.STOP
        assert scheduler.num_waiting == 0 and scheduler.plan() is None

    def test_it_finds_its_own_prefix_in_the_cache(self) -> None:
        harness = Harness(num_blocks=9, max_model_len=24)
        harness.add(make_request("a", [1] * 12, ignore_eos=True, max_tokens=8))
        victim = harness.add(make_request("b", [2] * 9, ignore_eos=True, max_tokens=12))
        harness.run()
        assert victim.num_preemptions == 1
        assert harness.scheduler.kv.prefix_hit_tokens >= 8
        assert victim.num_cached_tokens == 0  # what the caller is told is what its prompt hit when it arrived

    def test_priority_alone_does_not_preempt(self) -> None:
        harness = Harness(num_blocks=20, max_num_seqs=1)
        harness.add(make_request("a", [1, 2], ignore_eos=True, max_tokens=5))
        harness.step()
        harness.add(make_request("urgent", [3], priority=-5))
        assert rows_of(harness.launch())[0][0] == "a"
        harness.collect()
        harness.run()
        assert harness.scheduler.preemptions == 0


class TestAdmission:
    def test_priority_then_arrival(self) -> None:
        harness = Harness(num_blocks=40, max_num_seqs=1)
        for name, priority in (("a", 1), ("b", 0), ("c", 0), ("d", -1)):
            harness.add(make_request(name, [1, 2], priority=priority, max_tokens=1))
        order = [event.request.request_id for _ in range(4) for event in harness.step()]
        assert order == ["d", "b", "c", "a"]

    def test_nobody_overtakes_a_request_that_waits_for_blocks(self) -> None:
        harness = Harness(num_blocks=9, max_model_len=32)
        harness.add(make_request("a", [1] * 15, ignore_eos=True, max_tokens=5))
        harness.step()
        harness.add(make_request("large", [2] * 20))
        harness.add(make_request("small", [3]))
        assert rows_of(harness.launch()) == [("a", 15, 1, True)]
        assert harness.scheduler.num_waiting == 2

    def test_a_newcomer_leaves_the_running_a_block_to_grow_into(self) -> None:
        harness = Harness(num_blocks=6, max_model_len=20, enable_prefix_caching=False)
        harness.add(make_request("a", [1] * 8, ignore_eos=True, max_tokens=12))
        harness.step()
        harness.add(make_request("b", [2] * 9, max_tokens=3, ignore_eos=True))
        harness.step()
        assert harness.scheduler.num_running == 1  # a holds 3 of 5 blocks when it runs, b needs 3
        harness.run()
        assert harness.scheduler.preemptions == 0

    def test_a_prefix_hit_is_not_computed_again(self) -> None:
        harness = Harness(num_blocks=20)
        first = harness.add(make_request("a", [1] * 9, max_tokens=1))
        harness.step()
        second = harness.add(make_request("b", [1] * 9, max_tokens=1))
        plan = harness.launch()
        assert rows_of(plan) == [("b", 8, 1, True)]
        assert plan.admissions[0].num_computed == 8 and len(plan.admissions[0].block_ids) == 3
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)

    def test_a_prompt_whose_log_probabilities_are_wanted_runs_in_full(self) -> None:
        harness = Harness(num_blocks=20)
        harness.add(make_request("a", [1] * 9, max_tokens=1))
        harness.step()
        harness.add(make_request("b", [1] * 9, max_tokens=1, prompt_logprobs=0))
        assert rows_of(harness.launch()) == [("b", 0, 9, True)]

    def test_new_weights_make_old_prefixes_unfindable(self) -> None:
        harness = Harness(num_blocks=20)
        harness.add(make_request("a", [1] * 9, max_tokens=1))
        harness.step()
        harness.scheduler.forget_prefixes()
        harness.add(make_request("b", [1] * 9, max_tokens=1))
        assert rows_of(harness.launch()) == [("b", 0, 9, True)]


class TestRefusals:
    def test_a_prompt_without_room_for_an_output(self) -> None:
        scheduler = Harness(max_model_len=8).scheduler
        with pytest.raises(ConfigError, match="prompt of 8 tokens and max_model_len is 8"):
            scheduler.add(make_request("a", [1] * 8))
        scheduler.add(make_request("a", [1] * 7))

    @pytest.mark.parametrize(("num_prompt", "max_tokens", "fits"), [(8, 5, True), (8, 6, False), (5, None, False)])
    def test_what_the_pool_could_never_hold(self, num_prompt: int, max_tokens: int | None, fits: bool) -> None:
        harness = Harness(num_blocks=4, block_size=4, max_model_len=40)
        request = make_request("a", [1] * num_prompt, max_tokens=max_tokens, ignore_eos=True)
        if fits:
            harness.add(request)
            harness.run()
            assert len(request.tokens) == 13  # 12 cells and the last token, which has none
            assert harness.scheduler.preemptions == 0
        else:
            with pytest.raises(CapacityError, match=r"needs \d+ KV blocks of 4 and the pool has 3"):
                harness.scheduler.add(request)
            assert not harness.scheduler.has_unfinished and request.status is RequestStatus.WAITING

    def test_empty_duplicate_and_used(self) -> None:
        harness = Harness()
        with pytest.raises(ConfigError, match="empty prompt"):
            harness.scheduler.add(make_request("e", []))
        request = harness.add(make_request("a", [1], max_tokens=1))
        with pytest.raises(ConfigError, match="'a' is in use"):
            harness.scheduler.add(make_request("a", [1]))
        harness.run()
        with pytest.raises(ConfigError, match=r"scheduled before \(finished\)"):
            harness.scheduler.add(request)

    @pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
    def test_limits_that_cannot_work(self, name: str) -> None:
        limits = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 2, name: 0}
        with pytest.raises(ConfigError, match=f"{name}=0: must be at least"):
            Scheduler(num_blocks=4, block_size=4, **limits)


class TestEnding:
    def test_ids_that_are_not_there_have_no_effect(self) -> None:
        scheduler = Harness().scheduler
        assert scheduler.abort("x") is None
        assert scheduler.fail("x") is None
        assert scheduler.get("x") is None

    def test_a_stop_string_found_by_the_engine(self) -> None:
        harness = Harness(max_in_flight=2)
        request = harness.add(make_request("a", [1, 2], ignore_eos=True, max_tokens=20))
        harness.step()
        assert harness.finish("a", FinishReason.STOP, "END") is request
        assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "END")
        assert harness.collect() == []
        harness.check_idle()

    def test_one_request_fails_alone(self) -> None:
        harness = Harness(num_blocks=40)
        requests = [harness.add(make_request(f"r{i}", [1 + i] * 3, max_tokens=6, ignore_eos=True)) for i in range(3)]
        harness.step()
        harness.scheduler.fail("r1", "no such luck")
        harness.watch.look()
        harness.run()
        assert [request.finish_reason for request in requests] == [
            FinishReason.LENGTH,
            FinishReason.ERROR,
            FinishReason.LENGTH,
        ]
        assert requests[1].stop_reason == "no such luck"

    def test_a_step_that_was_not_launched_fails_its_requests_and_no_others(self) -> None:
        harness = Harness(num_blocks=40, max_num_seqs=2, max_in_flight=2)
        requests = [harness.add(make_request(f"r{i}", [1 + i] * 3, max_tokens=6, ignore_eos=True)) for i in range(3)]
        harness.launch()
        assert harness.plan_and_discard() == requests[:2]
        assert requests[0].finish_reason is FinishReason.ERROR and requests[0].stop_reason == "launch failed"
        harness.run()
        assert requests[2].finish_reason is FinishReason.LENGTH
        with pytest.raises(OstinatoError, match="step 99 is not in flight"):
            harness.scheduler.discard(StepPlan(99, ()), "")

    def test_no_requests_no_plan(self) -> None:
        scheduler = Harness().scheduler
        assert scheduler.plan() is None and not scheduler.has_unfinished and scheduler.num_steps_in_flight == 0


class TestResize:
    def test_running_requests_keep_their_blocks_and_are_admitted_again(self) -> None:
        harness = Harness(num_blocks=40, max_num_seqs=4)
        requests = [harness.add(make_request(f"r{i}", [1, 2, i], ignore_eos=True, max_tokens=20)) for i in range(3)]
        for _ in range(3):
            harness.step()
        tables = {request.request_id: list(harness.scheduler.kv.table(request.request_id)) for request in requests}
        harness.resize_rows(8, 16)
        plan = harness.launch()
        assert plan is not None
        assert [(a.request_id, a.num_computed, len(a.token_ids)) for a in plan.admissions] == [
            (request.request_id, 5, 6) for request in requests
        ]
        for admission in plan.admissions:
            table = tables[admission.request_id]
            assert list(admission.block_ids[: len(table)]) == table
        assert not plan.appends
        harness.collect()
        harness.run()
        assert [r.output_token_ids for r in requests] == [solo_outputs(r, harness.max_model_len, 7) for r in requests]
        assert harness.scheduler.preemptions == 0

    def test_the_worst_wait_where_there_are_fewer_rows(self) -> None:
        harness = Harness(num_blocks=40, max_num_seqs=4)
        requests = [harness.add(make_request(f"r{i}", [1, 2, i], ignore_eos=True, max_tokens=9)) for i in range(4)]
        harness.step()
        harness.resize_rows(1, 4)
        assert [request.status for request in requests] == [RequestStatus.RUNNING, *[RequestStatus.PREEMPTED] * 3]
        harness.run()
        assert [r.output_token_ids for r in requests] == [solo_outputs(r, harness.max_model_len, 7) for r in requests]

    def test_a_smaller_pool_takes_from_those_that_hold_what_goes(self) -> None:
        harness = Harness(num_blocks=40, max_num_seqs=2)
        first, second = (
            harness.add(make_request(name, [token] * 7, ignore_eos=True, max_tokens=9))
            for name, token in (("first", 1), ("second", 2))
        )
        harness.step()
        highest = max(harness.scheduler.kv.table("first"))
        assert min(harness.scheduler.kv.table("second")) > highest
        harness.resize_pool(highest + 1 + 4)
        harness.resize_pool(highest + 1)
        assert (first.num_preemptions, second.num_preemptions) == (0, 1)
        harness.resize_pool(30)
        harness.run()

    def test_only_between_steps(self) -> None:
        harness = Harness()
        harness.add(make_request("a", [1, 2]))
        harness.launch()
        with pytest.raises(OstinatoError, match="1 steps are in flight"):
            harness.scheduler.resize_rows(2, 4)
        with pytest.raises(OstinatoError, match="1 steps are in flight"):
            harness.scheduler.resize_pool(10)
