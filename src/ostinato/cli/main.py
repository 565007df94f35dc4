"""`ostinato COMMAND ...`: finds the command, runs it, and turns what it raises into one line and an exit code."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence

import ostinato
from ostinato.cli.parser import Parser, UsageError, explain_unknown
from ostinato.errors import OstinatoError

COMMANDS = {
    "generate": "complete prompts",
    "chat": "talk with a model in the terminal",
    "plan": "memory and recordings of a model, before it is loaded",
    "bench": "decode latency by CUDA graph mode and batch size",
    "demo": "four chat prompts in one batch, and what the engine did",
}
"""Each is the module of that name, with `configure(parser)` and `run(args) -> int`."""

EXIT_ERROR, EXIT_INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for an error of the user's or the engine's, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except OstinatoError as error:
        print(f"ostinato: error: {str(error).removeprefix('ostinato ')}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output left: `ostinato ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SystemExit as leaving:  # argparse, after --help or --version
        return leaving.code if isinstance(leaving.code, int) else 0


def _run(words: list[str]) -> int:
    if not words or words[0].startswith("-"):
        root = _root()
        root.parse(words)
        root.print_help()
        return 0 if words else EXIT_ERROR
    name = words[0]
    if name not in COMMANDS:
        raise UsageError(explain_unknown("command", name, COMMANDS, "ostinato"))
    command = importlib.import_module(f"ostinato.cli.{name}")
    parser = Parser(prog=f"ostinato {name}", description=command.__doc__)
    parser.add_argument("--verbose", "-v", action="store_true", help="log what the engine decides at start-up")
    command.configure(parser)
    args = parser.parse(words[1:])
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="%(levelname)s %(message)s")
    code: int = command.run(args)
    return code


def _root() -> Parser:
    lines = "\n".join(f"  {name:<10} {what}" for name, what in COMMANDS.items())
    parser = Parser(
        prog="ostinato",
        usage="ostinato COMMAND ... | --help | --version",
        description="An LLM inference engine whose GPU work is recorded once and repeated.",
        epilog=f"commands (ostinato COMMAND --help for the options of each):\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ostinato {ostinato.__version__}")
    return parser
