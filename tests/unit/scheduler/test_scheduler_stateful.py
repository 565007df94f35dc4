"""Random lives of a scheduler against the fake runner: whatever happens, the promises of `Watch` hold and nothing is
lost, leaked, stuck, or different from what each request would have got alone."""

from __future__ import annotations

from fake_runner import Harness, make_request, solo_outputs
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ostinato.request import FinishReason, Request

PREFIXES = ([1] * 40, [2, 3] * 20, [4, 5, 6, 1] * 10)


class AllAllowed:
    """A grammar that allows everything, and that nobody may ask again before it has heard which token came."""

    def __init__(self) -> None:
        self.accepted: list[int] = []
        self.num_masks = 0

    def mask(self) -> bytes:
        assert self.num_masks == len(self.accepted), "asked while a token is on its way"
        self.num_masks += 1
        return b"\xff" * 8

    def accept(self, token_id: int) -> bool:
        self.accepted.append(token_id)
        return True


class SchedulerLife(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []

    @initialize(
        num_blocks=st.integers(6, 20),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 24),
        max_in_flight=st.integers(1, 3),
        enable_prefix_caching=st.sampled_from([True, True, False]),
        vocab_size=st.sampled_from([7, 20, 60]),  # eos is one of them: outputs end early, late, or hardly ever
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_in_flight: int,
        enable_prefix_caching: bool,
        vocab_size: int,
    ) -> None:
        self.max_model_len = min(40, (num_blocks - 1) * block_size + 1)  # so that a lone request can fill the pool
        self.harness = Harness(
            num_blocks,
            block_size,
            max_num_seqs,
            max_num_batched_tokens,
            self.max_model_len,
            enable_prefix_caching,
            max_in_flight,
            vocab_size,
        )

    @rule(
        count=st.sampled_from([1, 1, 3, 6]),
        prefix=st.sampled_from(PREFIXES),
        num_shared=st.integers(0, 30),
        tail=st.lists(st.integers(1, 6), min_size=1, max_size=6),
        max_tokens=st.none() | st.integers(1, 30),
        min_tokens=st.integers(0, 8),
        priority=st.integers(-1, 1),
        seed=st.integers(0, 3),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        structured=st.sampled_from([False, False, True]),
    )
    def add(
        self,
        count: int,
        prefix: list[int],
        num_shared: int,
        tail: list[int],
        max_tokens: int | None,
        min_tokens: int,
        priority: int,
        seed: int,
        ignore_eos: bool,
        prompt_logprobs: int | None,
        structured: bool,
    ) -> None:
        prompt = (prefix[:num_shared] + tail)[: self.max_model_len - 1]
        for index in range(count):
            request = make_request(
                self.free_id(),
                prompt[index % 2 :] or prompt,
                priority=priority,
                seed=seed + index,
                max_tokens=max_tokens,
                min_tokens=min_tokens if max_tokens is None else min(min_tokens, max_tokens),
                ignore_eos=ignore_eos,
                prompt_logprobs=prompt_logprobs,
            )
            request.grammar = AllAllowed() if structured else None
            self.requests.append(self.harness.add(request))

    def free_id(self) -> str:
        """Ids are used again as soon as they may be, also while steps of their last owner are in flight."""
        index = 0
        while self.harness.scheduler.get(f"r{index}") is not None:
            index += 1
        return f"r{index}"

    @rule()
    def launch(self) -> None:
        self.harness.launch()

    @precondition(lambda self: self.harness.runner.launched)
    @rule()
    def collect(self) -> None:
        for event in self.harness.collect():
            assert event.finished == event.request.finished

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @precondition(lambda self: self.harness.scheduler.has_unfinished)
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP, FinishReason.ERROR]))
    def finish(self, data: st.DataObject, reason: FinishReason) -> None:
        request = data.draw(st.sampled_from([r for r in self.requests if not r.finished]))
        assert self.harness.finish(request.request_id, reason, "found outside") is request
        assert self.harness.finish(request.request_id, reason) is None

    @rule()
    def launch_fails(self) -> None:
        for request in self.harness.plan_and_discard():
            assert request.finish_reason is FinishReason.ERROR and request.stop_reason == "launch failed"

    @rule()
    def kv_is_lost(self) -> None:
        self.harness.runner.cells.clear()
        self.harness.scheduler.preempt_all()
        self.harness.watch.look()

    @rule()
    def weights_change(self) -> None:
        self.harness.runner.weights += 1
        self.harness.scheduler.forget_prefixes()
        self.harness.watch.look()

    @precondition(lambda self: not self.harness.runner.launched)
    @rule(max_num_seqs=st.integers(1, 6), max_num_batched_tokens=st.integers(1, 24))
    def rows_change(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """A new request state, which knows nobody."""
        self.harness.resize_rows(max_num_seqs, max_num_batched_tokens)

    @precondition(lambda self: not self.harness.runner.launched)
    @rule(more=st.integers(0, 8))
    def pool_changes(self, more: int) -> None:
        block_size = self.harness.block_size
        self.harness.resize_pool(1 - (1 - self.max_model_len) // block_size + more)

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.run()
        for request in self.requests:
            alone = solo_outputs(request, self.max_model_len, self.harness.vocab_size)
            outputs = request.output_token_ids
            if request.finish_reason is FinishReason.LENGTH:
                assert outputs == alone and (request.stop_reason is None)
            elif request.finish_reason is FinishReason.STOP and request.stop_reason is None:
                assert outputs == alone and outputs[-1] in request.stop_token_ids
                assert len(outputs) > request.params.min_tokens
            else:
                assert request.stop_reason in ("launch failed", "found outside")
                assert outputs == alone[: len(outputs)]
            assert request.slot is None and request.num_in_flight == 0
            if isinstance(request.grammar, AllAllowed):
                heard = request.grammar.accepted
                assert heard == outputs[: len(heard)] and len(outputs) - len(heard) <= 1
        assert self.harness.scheduler.preemptions == sum(request.num_preemptions for request in self.requests)


SchedulerLife.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestSchedulerLife = SchedulerLife.TestCase
