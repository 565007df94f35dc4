"""The `LLM` class as a caller meets it: shapes of prompts, order, life cycle, and what bad input is told."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ostinato import LLM, CapacityError, ConfigError, OstinatoError, SamplingParams, WeightError

from .conftest import TinyFactory
from .driving import greedy
from .models import TinyModel, prompts_of

V = 128


@pytest.fixture(scope="module")
def model(tiny_model: TinyFactory) -> TinyModel:
    return tiny_model("Llama", vocab_size=V, tokenizer=True)


def open_llm(model: TinyModel, **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "max_model_len": 64,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 32,
        "num_gpu_blocks_override": 20,
        "check": 1,
        **options,
    }
    return LLM(str(model.path), **settings)


PROMPT = prompts_of((11,), V, seed=30)[0]


def test_generate_twice_on_one_engine(model: TinyModel) -> None:
    """More prompts than rows, in another order the second time; every result belongs to its prompt."""
    prompts = prompts_of((5, 12, 3, 20, 9, 17, 1), V, seed=31)
    params = [greedy(4 + index) for index in range(7)]
    with open_llm(model) as llm:
        first = llm.generate(prompts, params)
        second = llm.generate(prompts[::-1], params[::-1])[::-1]
        stats = llm.stats()
    for prompt, one_params, a, b in zip(prompts, params, first, second, strict=True):
        assert a.prompt_token_ids == prompt
        assert a.outputs[0].token_ids == b.outputs[0].token_ids == model.greedy(prompt, one_params.max_tokens or 0)
    assert len({output.request_id for output in first + second}) == 14
    assert stats.free_blocks == stats.num_blocks - 1


def test_two_engines_in_one_process(model: TinyModel, tiny_model: TinyFactory) -> None:
    """Different models, used in turns; one goes on when the other is closed."""
    other = tiny_model("Qwen3", vocab_size=200, seed=5)
    prompt = prompts_of((13,), V, seed=32)[0]
    with open_llm(model) as first, open_llm(other, max_num_seqs=5, cudagraph_mode="FULL") as second:
        one = [first.engine.add_request(f"a{i}", prompt[: 5 + i], greedy(20)) for i in range(3)]
        two = [second.engine.add_request(f"a{i}", prompt[: 5 + i], greedy(20)) for i in range(3)]
        while first.engine.has_unfinished or second.engine.has_unfinished:
            first.engine.step()
            second.engine.step()
        for i in range(3):
            assert one[i].request.output_token_ids == model.greedy(prompt[: 5 + i], 20)
            assert two[i].request.output_token_ids == other.greedy(prompt[: 5 + i], 20)
        first.close()
        (output,) = second.generate([prompt], greedy(7))
        assert output.outputs[0].token_ids == other.greedy(prompt, 7)
    with open_llm(model) as again:
        assert again.generate([prompt], greedy(7))[0].outputs[0].token_ids == model.greedy(prompt, 7)


def test_close_is_idempotent(model: TinyModel) -> None:
    llm = open_llm(model)
    llm.engine.add_request("left open", PROMPT, greedy(30))
    llm.engine.step()
    llm.close()
    llm.close()
    with pytest.raises(OstinatoError, match="closed"):
        llm.generate([PROMPT], greedy(1))
    with llm, pytest.raises(OstinatoError, match="closed"):
        llm.stats()


def test_the_shapes_of_a_prompt(model: TinyModel) -> None:
    text = "".join(chr(token) for token in PROMPT)
    with open_llm(model) as llm:
        forms: list[Any] = [text, [text], PROMPT, [PROMPT], {"prompt": text}, [{"prompt_token_ids": PROMPT}]]
        outputs = [llm.generate(form, greedy(6)) for form in forms]
        assert llm.generate([], greedy(6)) == []
    assert all(len(result) == 1 for result in outputs)
    assert len({tuple(result[0].outputs[0].token_ids) for result in outputs}) == 1
    assert outputs[0][0].prompt == text
    assert outputs[2][0].prompt is None
    assert all(result[0].prompt_token_ids == PROMPT for result in outputs)


def test_defaults_are_vllms(model: TinyModel) -> None:
    """Without params: temperature 1, 16 tokens."""
    with open_llm(model) as llm:
        (output,) = llm.generate([PROMPT])
    assert output.outputs[0].finish_reason in ("length", "stop")
    assert len(output.outputs[0].token_ids) <= 16


def test_priorities(model: TinyModel) -> None:
    """One row, three prompts: the smallest priority value goes first."""
    with open_llm(model, max_num_seqs=1) as llm:
        order: list[str] = []
        states = [
            llm.engine.add_request(name, PROMPT, greedy(3), priority=priority)
            for name, priority in (("c", 5), ("a", -1), ("b", 2))
        ]
        while llm.engine.has_unfinished:
            order += [delta.request_id for delta in llm.engine.step() if delta.finished]
        assert order == ["a", "b", "c"]
        assert all(state.request.finished for state in states)
        with pytest.raises(ConfigError, match="2 priorities for 1 prompts"):
            llm.generate([PROMPT], greedy(1), priority=[1, 2])


def test_startup_parts_add_up(model: TinyModel) -> None:
    """The logged parts are the wall time, with all recordings and with none. A part that is forgotten is so every time;
    what a busy machine takes between two parts is not."""

    def missing_s(mode: str) -> float:
        started = time.perf_counter()
        llm = open_llm(model, cudagraph_mode=mode)
        wall = time.perf_counter() - started
        with llm:
            parts = llm.stats().startup_s
        assert sum(parts.values()) <= wall
        return wall * 0.95 - sum(parts.values())

    for mode in ("NONE", "FULL_AND_PIECEWISE"):
        assert any(missing_s(mode) < 0.03 for _ in range(5))


def test_progress_is_told(model: TinyModel) -> None:
    heard: list[tuple[str, int, int]] = []
    with open_llm(model, on_progress=lambda *what: heard.append(what)) as llm:
        total = llm.stats().num_recordings
    assert [done for what, done, _ in heard if what == "recording"] == list(range(1, total + 1))
    assert {count for _, _, count in heard} == {total}


def test_dummy_weights(model: TinyModel) -> None:
    """load_format="dummy" needs the config only, and repeats."""
    runs = []
    for _ in range(2):
        with open_llm(model, load_format="dummy") as llm:
            runs.append(llm.generate([PROMPT], greedy(5))[0].outputs[0].token_ids)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_16_bit_types_on_the_cpu(model: TinyModel, dtype: str) -> None:
    with open_llm(model, dtype=dtype, check=2) as llm:
        outputs = llm.generate([PROMPT, PROMPT[:3], PROMPT[:7]], greedy(20))
        assert llm.stats().dtype == dtype
    assert all(len(output.outputs[0].token_ids) == 20 for output in outputs)


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(model: TinyModel) -> Any:
    with open_llm(model) as llm:
        yield llm


@pytest.mark.parametrize(
    ("prompt", "params", "error", "pattern"),
    [
        ([[]], greedy(1), ConfigError, "empty"),
        ([[1, 2, V]], greedy(1), ConfigError, rf"{V}.*0 to {V - 1}"),
        ([[1, -1]], greedy(1), ConfigError, r"-1.*vocabulary"),
        ([[1, "x"]], greedy(1), ConfigError, "'x'"),
        ([list(range(1, 71))], greedy(1), ConfigError, r"70.*64"),
        ([PROMPT], greedy(1, logit_bias={V: 1.0}), ConfigError, rf"{V}.*vocabulary"),
        ([PROMPT], greedy(1, stop_token_ids=[V + 5]), ConfigError, rf"{V + 5}.*vocabulary"),
        ([{}], greedy(1), ConfigError, "prompt_token_ids"),
        ([PROMPT, PROMPT], [greedy(1)], ConfigError, "1 sampling params for 2 prompts"),
    ],
    ids=["empty", "above", "negative", "text", "long", "bias", "stop-id", "mapping", "params"],
)
def test_bad_requests(small: LLM, prompt: Any, params: Any, error: type[Exception], pattern: str) -> None:
    """Refused before anything runs, with the values; the good prompts beside it leave nothing behind."""
    batch = [PROMPT, *prompt] if isinstance(params, SamplingParams) else prompt
    with pytest.raises(error, match=pattern):
        small.generate(batch, params)
    assert not small.engine.scheduler.has_unfinished
    assert len(small.generate([PROMPT], greedy(2))[0].outputs[0].token_ids) == 2


def test_a_prompt_of_exactly_the_limit(small: LLM, model: TinyModel) -> None:
    """63 of 64 tokens leave room for one; 64 do not."""
    prompt = prompts_of((64,), V, seed=33)[0]
    (output,) = small.generate([prompt[:63]], greedy(10))
    assert output.outputs[0].token_ids == model.greedy(prompt[:63], 1)
    assert output.outputs[0].finish_reason == "length"
    with pytest.raises(ConfigError, match=r"64.*64"):
        small.generate([prompt], greedy(1))


def test_a_pool_that_cannot_hold_the_request(model: TinyModel) -> None:
    """Two blocks of 16 hold 32 tokens: the error counts blocks, and a shorter request is served."""
    with open_llm(model, num_gpu_blocks_override=3) as llm:
        with pytest.raises(CapacityError, match=r"needs 4 KV blocks of 16 and the pool has 2"):
            llm.generate([PROMPT], greedy(40))
        assert len(llm.generate([PROMPT], greedy(20))[0].outputs[0].token_ids) == 20


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"max_num_seq": 4}, "max_num_seqs"),
        ({"gpu_memory_utilisation": 0.5}, "gpu_memory_utilization"),
        ({"cuda_graph_mode": "FULL"}, "cudagraph_mode"),
        ({"cudagraph_mode": "FULL_AND_PEACEWISE"}, "FULL_AND_PIECEWISE"),
        ({"max_model_len": 513}, "513.*512"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_seqs": 64}, "max_num_batched_tokens"),
        ({"cudagraph_capture_sizes": []}, "empty"),
        ({"cudagraph_capture_sizes": [0, 4]}, r"\[0\]"),
        ({"cudagraph_capture_sizes": [64]}, "64"),
        ({"cudagraph_capture_sizes": "auto"}, "needs steps that were counted: start without it"),
        ({"cudagraph_capture_sizes": "1,2"}, "a list of sizes, or {'uniform'"),
        ({"cudagraph_capture_sizes": {"decode": [1]}}, "a list of sizes, or {'uniform'"),
        ({"cudagraph_capture_sizes": {"uniform": [1, 33]}}, r"\[33\]"),
        ({"num_gpu_blocks_override": 1}, "num_gpu_blocks_override=1"),
        ({"block_size": 12}, "power of two"),
        ({"dtype": "int8"}, "dtype"),
        ({"device": "tpu"}, "device"),
        ({"max_in_flight": 3}, "max_in_flight=3"),
        ({"max_num_seqs": 65_537, "max_num_batched_tokens": 100_000}, "max_num_seqs=65537: must be at most 65536"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization=0.0"),
        ({"check": -1}, "check=-1"),
    ],
)
def test_bad_options(model: TinyModel, options: dict[str, Any], pattern: str) -> None:
    """A ConfigError with the value, and the nearest name where a name is wrong."""
    with pytest.raises(ConfigError, match=pattern):
        open_llm(model, **options)


def test_text_without_a_tokenizer(tiny_model: TinyFactory) -> None:
    with open_llm(tiny_model("Llama")) as llm:
        with pytest.raises(ConfigError, match="token ids"):
            llm.generate("text", greedy(1))
        with pytest.raises(ConfigError, match="stop strings"):
            llm.generate([[1, 2]], greedy(1, stop="x"))
        (output,) = llm.generate([[1, 2]], greedy(3))
        assert output.outputs[0].text == ""


def test_weights_that_do_not_fit(tiny_model: TinyFactory, tmp_path: Any) -> None:
    """All of them are listed, and nothing is built."""
    import json
    import shutil

    folder = tmp_path / "broken"
    shutil.copytree(tiny_model("Llama").path, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 3, "intermediate_size": 100}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightError) as caught:
        LLM(str(folder))
    message = str(caught.value)
    assert "model.layers.2.self_attn.q_proj.weight" in message
    assert "model.layers.0.mlp.gate_proj.weight" in message
    assert "[96, 64]" in message
    assert "[100, 64]" in message
