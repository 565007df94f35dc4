"""Long loads on a pool that is too small for them, in one setting each: every output as if served alone, however many
steps are in flight, and the pressure that the setting was made for did occur."""

from __future__ import annotations

import random
from itertools import count

import pytest
from fake_runner import EOS, Harness, make_request, solo_outputs

from ostinato.request import FinishReason, Request

MAX_MODEL_LEN = 64
BLOCK_SIZE = 4


def soak(harness: Harness, rng: random.Random, num_steps: int, abort_rate: float = 0.0) -> list[Request]:
    """Keep 3 to 8 requests unfinished for `num_steps` turns, then let all end."""
    ids = count()
    requests: list[Request] = []
    shared = [rng.randrange(1, 7) for _ in range(24)]
    for _ in range(num_steps):
        unfinished = [request for request in requests if not request.finished]
        if len(unfinished) < 3 or (len(unfinished) < 8 and rng.random() < 0.3):
            prompt = shared[: rng.randrange(24)] + [rng.randrange(1, 7) for _ in range(rng.randrange(1, 12))]
            request = make_request(
                f"r{next(ids)}",
                prompt,
                priority=rng.choice([0, 0, 1]),
                seed=rng.randrange(1000),
                max_tokens=rng.choice([None, 1, 5, 30]),
                min_tokens=rng.choice([0, 0, 1]),
            )
            requests.append(harness.add(request))
        if unfinished and rng.random() < abort_rate:
            harness.finish(rng.choice(unfinished).request_id, FinishReason.ABORT)
        harness.step()
    harness.run()
    return requests


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_pool_for_three_and_a_half_requests(max_in_flight: int, enable_prefix_caching: bool) -> None:
    harness = Harness(
        num_blocks=1 + int(3.5 * MAX_MODEL_LEN / BLOCK_SIZE) // 2,  # requests fill about half their length
        block_size=BLOCK_SIZE,
        max_num_seqs=6,
        max_num_batched_tokens=20,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=enable_prefix_caching,
        max_in_flight=max_in_flight,
        vocab_size=25,
    )
    requests = soak(harness, random.Random(max_in_flight), 500, abort_rate=0.01)
    for request in requests:
        alone = solo_outputs(request, MAX_MODEL_LEN, harness.vocab_size)
        if request.finish_reason is FinishReason.ABORT:
            assert request.output_token_ids == alone[: len(request.output_token_ids)]
        else:
            assert request.output_token_ids == alone
            assert request.finish_reason is (FinishReason.STOP if alone[-1] == EOS else FinishReason.LENGTH)
    assert len(requests) > 50
    assert harness.scheduler.preemptions > 5
    assert harness.runner.max_seen_rows >= 4
    assert (harness.scheduler.kv.prefix_hit_tokens > 100) == enable_prefix_caching


def test_more_preemptions_do_not_mean_less_done() -> None:
    """A tighter pool takes more steps, but a request recomputed is not a request starved."""
    num_steps = {}
    for num_blocks in (17, 24, 200):
        harness = Harness(num_blocks, BLOCK_SIZE, 6, 20, MAX_MODEL_LEN, max_in_flight=2, vocab_size=60)
        for index in range(12):
            harness.add(make_request(f"r{index}", [1 + index % 6] * (5 + index), seed=index, max_tokens=None))
        harness.run()
        num_steps[num_blocks] = len(harness.plans)
    assert num_steps[200] < num_steps[24] < num_steps[17] < 12 * MAX_MODEL_LEN
