"""The command line offers what the dataclasses have, no more and no less."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from ostinato.cli.options import (
    ENGINE_OPTIONS,
    SAMPLING_OPTIONS,
    Option,
    add_engine_options,
    add_sampling_options,
    biases,
    byte_size,
    engine_options,
    integers,
    sampling_params,
    structure,
)
from ostinato.cli.parser import Parser, UsageError
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.request import SamplingParams, StructuredOutputsParams

GOLDEN_ENGINE_FLAGS = """
    --device --dtype --kv-cache-dtype --calculate-kv-scales --load-format --max-model-len --max-num-seqs
    --max-num-batched-tokens --block-size
    --num-gpu-blocks-override --gpu-memory-utilization --enable-prefix-caching --enforce-eager
    --attention-backend --capture
    --cudagraph-mode --cudagraph-cut --cudagraph-capture-sizes --kv-transfer-config
    --max-in-flight --compile --batch-invariant --enable-layerwise-nvtx-tracing --engine-seed --check --poison
"""
GOLDEN_SAMPLING_FLAGS = """
    --n --max-tokens --min-tokens --temperature --top-p --top-k --min-p --repetition-penalty
    --presence-penalty --frequency-penalty --seed --stop --stop-token-ids --ignore-eos
    --include-stop-str-in-output --logprobs --prompt-logprobs --logit-bias --detokenize --skip-special-tokens
    --structured-outputs
"""


def parser() -> Parser:
    made = Parser(prog="ostinato test")
    add_engine_options(made)
    add_sampling_options(made)
    made.add_argument("prompts", nargs="*")
    return made


def test_golden_flags() -> None:
    assert [option.name for option in ENGINE_OPTIONS] == GOLDEN_ENGINE_FLAGS.split()
    assert [option.name for option in SAMPLING_OPTIONS] == GOLDEN_SAMPLING_FLAGS.split()


@pytest.mark.parametrize(("options", "kind"), [(ENGINE_OPTIONS, EngineConfig), (SAMPLING_OPTIONS, SamplingParams)])
def test_every_field_has_one_flag(options: tuple[Option, ...], kind: type[EngineConfig] | type[SamplingParams]) -> None:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    fields.pop("model", None)
    assert sorted(option.field for option in options) == sorted(fields)
    for option in options:
        assert (option.parse is None) == isinstance(fields[option.field].default, bool), option.field
        if option.field != "seed":
            assert option.name == "--" + option.field.replace("_", "-")


def test_only_what_was_typed_is_passed_on() -> None:
    args = parser().parse(["M"])
    assert engine_options(args) == {}
    assert sampling_params(args) == SamplingParams()
    assert sampling_params(args, max_tokens=7).max_tokens == 7


def test_values_reach_their_fields() -> None:
    line = (
        "M --max-num-seqs 8 --cudagraph-capture-sizes 1,2,4 --enforce-eager --no-poison --no-enable-prefix-caching "
        "--check 3 --engine-seed 5 --gpu-memory-utilization 0.5 --seed 11 --top-k 7 --stop END --stop .. "
        "--stop-token-ids 1,2 --logit-bias 3:-1.5,4:2 --ignore-eos --presence-penalty -1.5 --max-tokens 9"
    )
    args = parser().parse(line.split())
    options = engine_options(args)
    assert options == {
        "max_num_seqs": 8,
        "cudagraph_capture_sizes": [1, 2, 4],
        "enforce_eager": True,
        "poison": False,
        "enable_prefix_caching": False,
        "check": 3,
        "seed": 5,
        "gpu_memory_utilization": 0.5,
    }
    assert EngineConfig.from_options("M", options).check == 3
    params = sampling_params(args, max_tokens=1)
    assert (params.seed, params.top_k, params.stop, params.ignore_eos) == (11, 7, ["END", ".."], True)
    assert (params.stop_token_ids, params.logit_bias) == ([1, 2], {3: -1.5, 4: 2.0})
    assert (params.presence_penalty, params.max_tokens) == (-1.5, 9)


@pytest.mark.parametrize(
    "words",
    [
        ["M", "one", "two", "--top-k", "3"],
        ["M", "--top-k", "3", "one", "two"],
        ["--top-k", "3", "M", "one", "two"],
        ["M", "one", "--top-k", "3", "two"],
    ],
)
def test_options_may_stand_anywhere(words: list[str]) -> None:
    args = parser().parse(words)
    assert (args.model, args.prompts, args.top_k) == ("M", ["one", "two"], 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["M", "--temprature", "1"], "unknown option --temprature: did you mean --temperature?"),
        (["M", "--max-num-seq=4"], "unknown option --max-num-seq: did you mean --max-num-seqs?"),
        (["M", "--qqq"], "unknown option --qqq: see ostinato test --help"),
        (["M", "--top-k", "many"], "invalid int value: 'many'"),
        (["M", "--cudagraph-capture-sizes", "1,x"], "not a list of whole numbers"),
        (["M", "--logit-bias", "5"], "not a list of id:bias pairs"),
        ([], "MODEL"),
    ],
)
def test_usage_errors(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parser().parse(words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * 2**30), ("80GB", 80 * 10**9), ("141e9", 141 * 10**9), (" 1.5 MiB", 3 * 2**19), ("7B", 7), ("7", 7)],
)
def test_byte_size(text: str, size: int) -> None:
    assert byte_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "80 gigs", "80Gi", "-1GiB", "0", "nan", "inf", "1e400"])
def test_byte_size_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        byte_size(text)


def test_lists() -> None:
    assert integers("3") == [3]
    assert biases("7:0.5") == {7: 0.5}


def test_structures() -> None:
    assert structure('{"choice": ["yes", "no"]}') == StructuredOutputsParams(choice=["yes", "no"])
    for wrong in ("{", '"a"', '{"regex": "a", "choice": ["b"]}', '{"pattern": "a"}', "{}"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a structure such as"):
            structure(wrong)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,2,4", [1, 2, 4]),
        ("1,8/64,512", {"uniform": [1, 8], "mixed": [64, 512]}),
        ("/64", {"mixed": [64]}),
        ("8/", {"uniform": [8]}),
        ("auto", "auto"),
    ],
)
def test_sizes_to_record(text: str, value: object) -> None:
    args = parser().parse(["M", "--cudagraph-capture-sizes", text])
    assert engine_options(args) == {"cudagraph_capture_sizes": value}


@pytest.mark.parametrize("text", ["", "/", "1/2/3", "1,x/3", "automatic"])
def test_what_are_no_sizes_to_record(text: str) -> None:
    with pytest.raises(UsageError, match="such as 1,2,4"):
        parser().parse(["M", "--cudagraph-capture-sizes", text])
