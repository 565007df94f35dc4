"""Sampling through the whole engine: seeds, penalties, bans, stops, log-probabilities, n, aborts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from ostinato import LLM, CompletionOutput, SamplingParams

from .conftest import TinyFactory
from .driving import MODES, drive, greedy
from .models import TinyModel, prompts_of

V = 128  # every token is an ASCII character, so that texts and ids correspond one to one


@pytest.fixture(scope="module")
def model(tiny_model: TinyFactory) -> TinyModel:
    return tiny_model("Llama", vocab_size=V, tokenizer=True)


def open_llm(model: TinyModel, mode: str = "FULL_AND_PIECEWISE", **options: object) -> LLM:
    settings: dict[str, object] = {
        "max_model_len": 128,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 48,
        "num_gpu_blocks_override": 60,
        "cudagraph_mode": mode,
        "check": 1,
        **options,
    }
    return LLM(str(model.path), **settings)


@pytest.fixture(scope="module")
def llm(model: TinyModel) -> Iterator[LLM]:
    with open_llm(model) as opened:
        yield opened


def one(llm: LLM, prompt: list[int] | str, params: SamplingParams) -> CompletionOutput:
    return llm.generate([prompt], params)[0].outputs[0]


PROMPT = prompts_of((19,), V, seed=20)[0]


# -- seeds -------------------------------------------------------------------------------------------------------------

SEEDED = [
    SamplingParams(temperature=1.0, seed=1, max_tokens=10, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=20, seed=2, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.3, top_p=0.8, seed=2**40 + 3, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=1.0, min_p=0.05, seed=4, max_tokens=10, ignore_eos=True),
    SamplingParams(presence_penalty=1.5, frequency_penalty=0.5, seed=5, max_tokens=11, ignore_eos=True),
    SamplingParams(temperature=0.9, repetition_penalty=1.4, seed=6, max_tokens=10, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True),
]


def test_same_seed_same_tokens_in_every_mode_and_batch(model: TinyModel) -> None:
    """Alone, together, in reverse order, late beside others: a draw depends on seed, length and logits only."""
    prompts = prompts_of((3, 17, 8, 33, 5, 12, 20), V, seed=21)
    expected: list[list[int]] | None = None
    for mode in MODES:
        with open_llm(model, mode) as llm:
            together = drive(llm, prompts, SEEDED).tokens
            backwards = drive(llm, prompts[::-1], SEEDED[::-1]).tokens[::-1]
            late = drive(llm, prompts, SEEDED, arrivals=(0, 1, 4, 4, 7, 9, 12)).tokens
            alone = [drive(llm, [prompt], params).tokens[0] for prompt, params in zip(prompts, SEEDED, strict=True)]
        expected = expected or together
        assert together == expected, mode
        assert backwards == expected, mode
        assert late == expected, mode
        assert alone == expected, mode


def test_different_seeds_differ(llm: LLM) -> None:
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=12, ignore_eos=True) for seed in range(8)]
    tokens = [tuple(output.outputs[0].token_ids) for output in llm.generate([PROMPT] * 8, params)]
    assert len(set(tokens)) == 8


def test_seeds_that_share_their_low_words_differ(llm: LLM) -> None:
    """All 64 bits count."""
    seeds = (7, 7 + 2**32, 7 + 2**63)
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=12, ignore_eos=True) for seed in seeds]
    tokens = [tuple(output.outputs[0].token_ids) for output in llm.generate([PROMPT] * 3, params)]
    assert len(set(tokens)) == 3


def test_without_seeds_a_run_repeats_as_a_whole(model: TinyModel) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)
    runs = []
    for seed in (0, 0, 1):
        with open_llm(model, seed=seed) as llm:
            runs.append([output.outputs[0].token_ids for output in llm.generate([PROMPT] * 3, params)])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert len({tuple(tokens) for tokens in runs[0]}) == 3, "requests without a seed draw alike"


def test_draws_follow_the_distribution(llm: LLM, model: TinyModel) -> None:
    """600 first tokens at temperature 0.5 against the softmax: total variation well below that of a wrong one."""
    probabilities = torch.softmax(model.logits(PROMPT)[-1] / 0.5, dim=-1)
    params = [SamplingParams(temperature=0.5, seed=seed, max_tokens=1) for seed in range(600)]
    drawn = [output.outputs[0].token_ids[0] for output in llm.generate([PROMPT] * 600, params)]
    shares = torch.bincount(torch.tensor(drawn), minlength=V) / 600
    top = probabilities.topk(5).indices
    assert (shares[top] - probabilities[top]).abs().max() < 0.08


def test_top_k_and_top_p_keep_only_their_tokens(llm: LLM, model: TinyModel) -> None:
    base = SamplingParams(temperature=3.0, max_tokens=8, ignore_eos=True)
    params = [replace(base, top_k=3, seed=seed) for seed in range(4)]
    params += [replace(base, top_p=0.2, seed=seed) for seed in range(4)]
    for index, output in enumerate(llm.generate([PROMPT] * 8, params)):
        tokens = output.outputs[0].token_ids
        logits = model.logits([*PROMPT, *tokens])[len(PROMPT) - 1 : -1]
        for row, token in zip(logits, tokens, strict=True):
            probabilities = torch.softmax(row / 3.0, dim=-1)
            above = probabilities[probabilities > probabilities[token]]
            assert len(above) < 3 if index < 4 else above.sum() < 0.2 + 1e-5


# -- what changes the logits -------------------------------------------------------------------------------------------


def penalised_greedy(model: TinyModel, prompt: list[int], params: SamplingParams, num_tokens: int) -> list[int]:
    """vLLM's definition, spelled out: repetition over prompt and output, frequency and presence over output."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        row, factor = model.logits(tokens)[-1].clone(), params.repetition_penalty
        for token in set(tokens):
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        for token in tokens[len(prompt) :]:
            row[token] -= params.frequency_penalty
        for token in set(tokens[len(prompt) :]):
            row[token] -= params.presence_penalty
        tokens.append(int(row.argmax()))
    return tokens[len(prompt) :]


def test_penalties(llm: LLM, model: TinyModel) -> None:
    """Mixed in one batch with a row that has none, whose state rows are then taken over by rows that have others."""
    prompts = prompts_of((6, 14, 9, 21), V, seed=22)
    for _ in range(2):
        params = [
            greedy(24, repetition_penalty=1.8),
            greedy(24, presence_penalty=2.0),
            greedy(24),
            greedy(24, frequency_penalty=1.1, repetition_penalty=0.7),
        ]
        outputs = llm.generate(prompts, params)
        for prompt, one_params, output in zip(prompts, params, outputs, strict=True):
            assert output.outputs[0].token_ids == penalised_greedy(model, prompt, one_params, 24)
        prompts = prompts[::-1]


def test_penalties_survive_preemption(model: TinyModel) -> None:
    """A preempted row is admitted again with outputs among its known tokens: they still count as outputs."""
    prompts = prompts_of((31, 33, 30), V, seed=23)
    params = [greedy(36, presence_penalty=1.7), greedy(36, frequency_penalty=0.9), greedy(36, repetition_penalty=1.5)]
    with open_llm(model, num_gpu_blocks_override=10) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.stats().preemptions > 0
    for prompt, one_params, output in zip(prompts, params, outputs, strict=True):
        assert output.outputs[0].token_ids == penalised_greedy(model, prompt, one_params, 36)


def test_logit_bias_forces_and_forbids(llm: LLM, model: TinyModel) -> None:
    favourite = model.greedy(PROMPT, 1)[0]
    params = [greedy(5, logit_bias={42: 100.0}), greedy(5, logit_bias={favourite: -100.0}), greedy(5)]
    forced, forbidden, plain = (output.outputs[0].token_ids for output in llm.generate([PROMPT] * 3, params))
    assert forced == [42] * 5
    assert favourite not in forbidden
    assert plain == model.greedy(PROMPT, 5)


def test_min_tokens_bans_every_stop_id(llm: LLM, model: TinyModel) -> None:
    """With a bias that makes the end certain: none before min_tokens, at once after."""
    certain = {0: 100.0, 7: 90.0}
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, min_tokens=6, logit_bias=certain, stop_token_ids=[7]),
        SamplingParams(temperature=0.0, max_tokens=20, logit_bias=certain),
        SamplingParams(temperature=1.0, seed=3, max_tokens=20, min_tokens=9, logit_bias=certain, stop_token_ids=[7]),
    ]
    first, second, third = (output.outputs[0] for output in llm.generate([PROMPT] * 3, params))
    assert (len(first.token_ids), first.finish_reason) == (7, "stop")
    assert not {0, 7} & set(first.token_ids[:6])
    assert second.token_ids == [0]
    assert len(third.token_ids) == 10
    assert not {0, 7} & set(third.token_ids[:9])


# -- where an answer ends ----------------------------------------------------------------------------------------------


def test_stop_ids(llm: LLM, model: TinyModel) -> None:
    """The stopping token is among the ids and not in the text; eos ends with no stop_reason, a stop id names itself."""
    follow = model.greedy(PROMPT, 12)
    stop = next(token for token in follow[4:] if token not in follow[:4] and token != 0)
    where = follow.index(stop)
    output = one(llm, PROMPT, SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[stop, 3], ignore_eos=True))
    assert output.token_ids == follow[: where + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == "".join(chr(token) for token in follow[:where] if token != 0)

    ended = one(llm, PROMPT, SamplingParams(temperature=0.0, max_tokens=12, logit_bias={0: 100.0}))
    assert (ended.token_ids, ended.text, ended.finish_reason, ended.stop_reason) == ([0], "", "stop", None)


def test_ignore_eos(llm: LLM) -> None:
    ignoring = one(llm, PROMPT, greedy(6, logit_bias={0: 100.0}))
    assert (ignoring.token_ids, ignoring.finish_reason) == ([0] * 6, "length")


def test_stop_strings(llm: LLM, model: TinyModel) -> None:
    """Cut before the string, or after it when asked to; across tokens, since a token is one character here."""
    text = one(llm, PROMPT, greedy(30)).text
    assert len(text) > 20
    stop = text[9:12]
    where = text.index(stop)
    trimmed = one(llm, PROMPT, greedy(30, stop=["never there", stop]))
    assert trimmed.text == text[:where]
    assert (trimmed.finish_reason, trimmed.stop_reason) == ("stop", stop)
    assert len(trimmed.token_ids) < 30
    kept = one(llm, PROMPT, greedy(30, stop=stop, include_stop_str_in_output=True))
    assert kept.text == text[: where + len(stop)]
    assert one(llm, PROMPT, greedy(30, stop=["not in it at all"])).text == text
    assert llm.stats().free_blocks == llm.stats().num_blocks - 1


def test_a_stop_string_on_the_last_token(llm: LLM) -> None:
    """It ends the answer as a stop, even where max_tokens would end it too."""
    text = one(llm, PROMPT, greedy(10, skip_special_tokens=False)).text
    output = one(llm, PROMPT, greedy(10, skip_special_tokens=False, stop=text[-2:]))
    if text.index(text[-2:]) == len(text) - 2:
        assert (output.text, output.finish_reason) == (text[:-2], "stop")
        assert len(output.token_ids) == 10


def test_max_tokens(llm: LLM) -> None:
    outputs = llm.generate([PROMPT] * 3, [greedy(1), greedy(2), greedy(17)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 17]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


# -- log-probabilities -------------------------------------------------------------------------------------------------


def assert_table(table: dict, expected: torch.Tensor, token: int, num_top: int) -> None:
    """`expected` [V] is transformers' log_softmax; the chosen token comes first, then the likeliest."""
    assert next(iter(table)) == token
    assert table[token].logprob == pytest.approx(expected[token].item(), abs=1e-4)
    assert table[token].rank == int((expected > expected[token]).sum()) + 1
    top = expected.topk(num_top) if num_top else None
    others = [entry for entry in table if entry != token or table[entry].rank <= num_top]
    assert len(others) == num_top
    if top is not None:
        assert set(others) == set(top.indices.tolist())
        for rank, (value, index) in enumerate(zip(top.values.tolist(), top.indices.tolist(), strict=True), start=1):
            assert table[index].logprob == pytest.approx(value, abs=1e-4)
            assert table[index].rank == rank
    assert all(entry.decoded_token is not None for entry in table.values())


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_logprobs(model: TinyModel, mode: str) -> None:
    """Raw ones, whatever temperature and penalties do; rows that ask for none in between; 0 to 20 alternatives."""
    prompts = prompts_of((4, 18, 9, 30), V, seed=24)
    params = [
        greedy(8, logprobs=5),
        SamplingParams(seed=1, top_k=30, max_tokens=8, logprobs=20, presence_penalty=1.0, ignore_eos=True),
        greedy(8),
        SamplingParams(temperature=0.8, seed=2, max_tokens=8, logprobs=0, ignore_eos=True),
    ]
    with open_llm(model, mode) as llm:
        outputs = llm.generate(prompts, params)
    for prompt, one_params, output in zip(prompts, params, outputs, strict=True):
        answer = output.outputs[0]
        if one_params.logprobs is None:
            assert answer.logprobs is None
            assert answer.cumulative_logprob is None
            continue
        assert answer.logprobs is not None
        assert len(answer.logprobs) == 8
        expected = model.logprobs([*prompt, *answer.token_ids])[len(prompt) - 1 :]
        for table, row, token in zip(answer.logprobs, expected[:-1], answer.token_ids, strict=True):
            assert_table(table, row, token, one_params.logprobs)
        total = sum(table[token].logprob for table, token in zip(answer.logprobs, answer.token_ids, strict=True))
        assert answer.cumulative_logprob == pytest.approx(total)


@pytest.mark.parametrize("mode", ["NONE", "FULL", "FULL_AND_PIECEWISE"])
def test_prompt_logprobs(model: TinyModel, mode: str) -> None:
    """In chunks of 16, beside others, and the same again when the prompt could have come from the cache."""
    prompts = prompts_of((50, 7, 17), V, seed=25)
    params = [greedy(4, prompt_logprobs=3), greedy(4), greedy(4, prompt_logprobs=0, logprobs=2)]
    with open_llm(model, mode, max_num_batched_tokens=16) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, params)
            assert outputs[1].prompt_logprobs is None
            for index in (0, 2):
                tables = outputs[index].prompt_logprobs
                assert tables is not None
                assert len(tables) == len(prompts[index])
                assert tables[0] is None
                expected = model.logprobs(prompts[index])
                for position, table in enumerate(tables[1:]):
                    assert table is not None
                    token = prompts[index][position + 1]
                    assert_table(table, expected[position], token, params[index].prompt_logprobs or 0)


def test_a_prompt_of_one_token_has_no_prompt_logprobs(llm: LLM) -> None:
    (output,) = llm.generate([[5]], greedy(3, prompt_logprobs=2))
    assert output.prompt_logprobs == [None]


# -- several answers, streams, aborts ----------------------------------------------------------------------------------


def test_n_answers(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=11, max_tokens=9, ignore_eos=True)
    outputs = llm.generate([PROMPT, PROMPT[:5]], params)
    for output in outputs:
        assert [answer.index for answer in output.outputs] == [0, 1, 2]
        assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
        assert output.finished
    assert outputs[0].outputs[1].token_ids == one(llm, PROMPT, replace(params, n=1, seed=12)).token_ids


def test_stream_deltas_join_to_the_text(llm: LLM) -> None:
    params = greedy(25, logprobs=1)
    whole = one(llm, "Hello, world", params)
    deltas = list(llm.stream("Hello, world", params))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1].finish_reason == "length"
    assert [table for delta in deltas for table in delta.logprobs] == whole.logprobs


def test_stream_of_broken_characters(tiny_model: TinyFactory) -> None:
    """Random bytes: unfinished characters are held back and come out as U+FFFD; padded ids have no text."""
    model = tiny_model("Llama", vocab_size=272, tokenizer=True)
    with open_llm(model) as llm:
        for seed in range(3):
            params = SamplingParams(temperature=1.5, seed=seed, max_tokens=40, ignore_eos=True)
            whole = one(llm, PROMPT, params)
            streamed = "".join(delta.text for delta in llm.stream(PROMPT, params))
            assert streamed == whole.text
            assert whole.text == llm.tokenizer.decode(whole.token_ids)


def test_stream_with_a_stop_string_never_shows_it(llm: LLM) -> None:
    text = one(llm, PROMPT, greedy(30)).text
    stop = text[9:12]
    shown = "".join(delta.text for delta in llm.stream(PROMPT, greedy(30, stop=stop)))
    assert shown == text[: text.index(stop)]


@pytest.mark.timeout(120)
def test_two_streams_at_once(llm: LLM) -> None:
    """Taken from in turns, each gets all of its own."""
    expected = [one(llm, PROMPT, greedy(12)).token_ids, one(llm, PROMPT[:4], greedy(20)).token_ids]
    streams = [llm.stream(PROMPT, greedy(12)), llm.stream(PROMPT[:4], greedy(20))]
    got: list[list[int]] = [[], []]
    running = [0, 1]
    while running:
        for index in list(running):
            delta = next(streams[index], None)
            if delta is None:
                running.remove(index)
            else:
                got[index] += delta.token_ids
    assert got == expected


@pytest.mark.timeout(120)
def test_generate_while_a_stream_is_open(llm: LLM) -> None:
    expected = one(llm, PROMPT, greedy(10)).token_ids
    stream = llm.stream(PROMPT, greedy(10))
    got = list(next(stream).token_ids)
    assert len(one(llm, PROMPT[:6], greedy(20)).token_ids) == 20
    for delta in stream:
        got += delta.token_ids
    assert got == expected


def test_closing_a_stream_aborts_it(llm: LLM) -> None:
    stream = llm.stream(PROMPT, greedy(100))
    for _ in range(5):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.scheduler.has_unfinished
    llm.generate([PROMPT[:3]], greedy(2))
    assert llm.stats().free_blocks == llm.stats().num_blocks - 1


def test_a_stream_that_is_never_read_leaves_nothing(llm: LLM) -> None:
    stream = llm.stream(PROMPT, greedy(100))
    stream.close()  # type: ignore[attr-defined]
    del stream
    assert not llm.engine.scheduler.has_unfinished


def test_abort_in_the_middle_frees_its_blocks(llm: LLM, model: TinyModel) -> None:
    """Of three: one while it waits for its prefill, one while it decodes. The third is not disturbed."""
    engine = llm.engine
    before = llm.stats().free_blocks
    states = [engine.add_request(f"abort-{index}", PROMPT, greedy(30)) for index in range(3)]
    engine.abort("abort-0")
    for _ in range(6):
        engine.step()
    assert llm.stats().free_blocks < before
    engine.abort("abort-1")
    engine.abort("abort-1")
    engine.abort("never there")
    while engine.has_unfinished:
        engine.step()
    assert states[2].request.output_token_ids == model.greedy(PROMPT, 30)
    assert {state.completion(0).finish_reason for state in states[:2]} == {"abort"}
    assert 0 < states[1].num_tokens < 30
    assert llm.stats().free_blocks == before
    engine.scheduler.check_integrity()


def test_an_interrupted_generate_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch, model: TinyModel) -> None:
    """Ctrl-C between two steps."""
    engine, step, count = llm.engine, llm.engine.step, 0

    def interrupted() -> list:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT] * 3, greedy(20))
    monkeypatch.undo()
    assert not engine.scheduler.has_unfinished
    assert one(llm, PROMPT, greedy(9)).token_ids == model.greedy(PROMPT, 9)
    assert llm.stats().free_blocks == llm.stats().num_blocks - 1


def test_a_step_that_fails_to_launch_leaves_the_engine_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, model: TinyModel
) -> None:
    """The error reaches the caller; blocks, rows and the step count are as if the step had never been planned."""
    runner, launch, count = llm.engine.runner, llm.engine.runner.launch, 0

    def failing(plan: object) -> object:
        nonlocal count
        count += 1
        if count == 5:
            raise RuntimeError("the device fell off")
        return launch(plan)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "launch", failing)
    with pytest.raises(RuntimeError, match="fell off"):
        llm.generate([PROMPT] * 3, greedy(20))
    monkeypatch.undo()
    assert one(llm, PROMPT, greedy(9)).token_ids == model.greedy(PROMPT, 9)
    assert llm.stats().free_blocks == llm.stats().num_blocks - 1
    llm.engine.scheduler.check_integrity()
