"""Four chat prompts of different length in one batch, a follow-up question, and what the engine did for them."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from ostinato.cli.options import ENGINE_OPTIONS, add_options, engine_options
from ostinato.cli.session import DOUBLING_SIZES, open_llm
from ostinato.config import EngineConfig
from ostinato.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

ENGINE_DEFAULTS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 256,
    "cudagraph_capture_sizes": DOUBLING_SIZES,
}
SYSTEM = (
    "You are a patient assistant. Answer in one short, plain sentence. Say so when you do not know, and never invent "
    "names or numbers."
)
QUESTIONS = (
    "What is the capital of France?",
    "Name three things that a baker needs to make bread.",
    "Who wrote Romeo and Juliet? I have to give a short talk about the play at school tomorrow.",
    "In music, an ostinato is a short phrase that repeats all through a piece while the melody above it changes. What "
    "is an ostinato?",
)
FOLLOW_UP = "Which river runs through it?"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ostinato demo [OPTIONS]"
    parser.add_argument("--model", default="smollm2", metavar="MODEL", help="a model with a chat template [smollm2]")
    parser.add_argument("--max-tokens", type=int, default=24, metavar="N", help="tokens of an answer [24]")
    add_options(parser, "engine options", ENGINE_OPTIONS, EngineConfig, **ENGINE_DEFAULTS)


def run(args: argparse.Namespace) -> int:
    from ostinato.cli.report import make_console, print_stats

    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    console = make_console()
    begun = time.perf_counter()
    with open_llm(args.model, **ENGINE_DEFAULTS | engine_options(args)) as llm:
        ready = time.perf_counter()
        conversations = [_conversation(question) for question in QUESTIONS]
        answers = llm.chat(conversations, params, use_tqdm=True)
        answered = time.perf_counter()
        # The first conversation goes on: all of it that fills whole blocks is in the cache already.
        follow_up = [*conversations[0], _message("assistant", answers[0].outputs[0].text), _message("user", FOLLOW_UP)]
        (last,) = llm.chat(follow_up, params)
        done = time.perf_counter()
        for question, answer in zip((*QUESTIONS, FOLLOW_UP), (*answers, last), strict=True):
            _print_answer(console, question, answer)
        print_stats(llm.stats(), console)
    for what, outputs, seconds in (
        (f"batch of {len(answers)}", answers, answered - ready),
        ("follow-up", [last], done - answered),
    ):
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        longest = max(len(output.outputs[0].token_ids) for output in outputs)
        console.print(
            f"{what}: {num_tokens} tokens in {seconds:.2f} s, {1e3 * seconds / num_tokens:.1f} ms per token "
            f"({1e3 * seconds / longest:.1f} ms between one request's tokens, prompts included)"
        )
    console.print(f"ready after {ready - begun:.1f} s")
    return 0


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _conversation(question: str) -> list[dict[str, str]]:
    return [_message("system", SYSTEM), _message("user", question)]


def _print_answer(console: Console, question: str, output: RequestOutput) -> None:
    completion = output.outputs[0]
    console.print(question, style="bold")
    console.print(completion.text.strip())
    console.print(
        f"{len(output.prompt_token_ids)} prompt tokens, {output.num_cached_tokens} of them from the cache; "
        f"{len(completion.token_ids)} tokens, {completion.finish_reason}\n",
        style="dim",
    )
