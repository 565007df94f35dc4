"""Completes prompts in one batch: those on the command line, or one on each line of standard input."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from ostinato.cli.options import (
    add_engine_options,
    add_sampling_options,
    engine_options,
    integers,
    sampling_params,
)
from ostinato.cli.parser import UsageError
from ostinato.cli.session import open_llm

if TYPE_CHECKING:
    from ostinato.engine.llm import LLM
    from ostinato.request import RequestOutput

DEFAULTS: dict[str, Any] = {"max_tokens": 128}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ostinato generate [OPTIONS] MODEL [PROMPT ...]"
    add_engine_options(parser)
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="text to complete")
    parser.add_argument(
        "--prompt-ids",
        type=integers,
        action="append",
        default=[],
        metavar="1,2,3",
        help="a prompt as token ids; repeat for more",
    )
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's message: use the chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    parser.add_argument("--json", action="store_true", help="one JSON object per prompt and line")
    parser.add_argument("--stats", action="store_true", help="say on standard error what the engine did")
    add_sampling_options(parser, **DEFAULTS)


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args, **DEFAULTS)
    if args.system is not None and not args.chat:
        raise UsageError("--system belongs to --chat: add it, or put the text into the prompt")
    texts: list[str] = args.prompts
    if not texts and not args.prompt_ids:
        texts = [line for line in sys.stdin.read().splitlines() if line.strip()]
        if not texts:
            raise UsageError("no prompt: give one as an argument, on standard input, or as --prompt-ids")
    with open_llm(args.model, **engine_options(args)) as llm:
        prompts = [_prompt(llm, text, args) for text in texts] + list(args.prompt_ids)
        outputs = llm.generate(prompts, params, use_tqdm=True)
        for output in outputs:
            if args.json:
                print(json.dumps(dataclasses.asdict(output), ensure_ascii=False))
            else:
                _print_text(output, label=len(outputs) > 1)
        if args.stats:
            from ostinato.cli.report import make_console, print_stats

            print_stats(llm.stats(), make_console(sys.stderr))
    return 0


def _prompt(llm: LLM, text: str, args: argparse.Namespace) -> Any:
    if not args.chat:
        return text
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return llm.chat_prompt([*system, {"role": "user", "content": text}])


def _print_text(output: RequestOutput, *, label: bool) -> None:
    """Token ids stand in for text where there is no tokenizer."""
    for completion in output.outputs:
        if label or len(output.outputs) > 1:
            print(f"[{output.request_id}.{completion.index}, {completion.finish_reason}]")
        print(completion.text if completion.text else " ".join(map(str, completion.token_ids)))
