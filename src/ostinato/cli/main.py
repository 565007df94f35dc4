"""`ostinato COMMAND ...`: finds the command, runs it, and turns what it raises into one line and an exit code."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence

import ostinato
from ostinato.cli.parser import Parser, UsageError, explain_unknown
from ostinato.errors import OstinatoError

COMMANDS = {
    "generate": "complete prompts",
    "chat": "talk with a model in the terminal",
    "serve": "an OpenAI-compatible HTTP server, with a page that shows the graphs at work",
    "plan": "memory and recordings of a model, before it is loaded",
    "tune": "the sizes to record with the least padding, from the steps of a server or a log",
    "inspect": "what a recording holds: the nodes of its graphs, in order",
    "bench": "measurements on this machine: latency, throughput, start-up, kernels",
    "demo": "four chat prompts in one batch, and what the engine did",
}
"""Each is the module of that name, with `configure(parser)` and `run(args) -> int`, or with `COMMANDS` of its own."""

_DESCRIPTION = "An LLM inference engine whose GPU work is recorded once and repeated."

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
    return _enter("ostinato", "ostinato.cli", _DESCRIPTION, COMMANDS, words)


def _enter(prog: str, package: str, description: str | None, commands: Mapping[str, str], words: list[str]) -> int:
    if not words or words[0].startswith("-"):
        index = _index(prog, description, commands)
        index.parse(words)
        index.print_help()
        return 0 if words else EXIT_ERROR
    name, rest = words[0], words[1:]
    if name not in commands:
        raise UsageError(explain_unknown("command", name, commands, prog))
    command = importlib.import_module(f"{package}.{name}")
    if (inner := getattr(command, "COMMANDS", None)) is not None:
        return _enter(f"{prog} {name}", command.__name__, command.__doc__, inner, rest)
    parser = Parser(prog=f"{prog} {name}", description=command.__doc__)
    parser.add_argument("--verbose", "-v", action="store_true", help="log what the engine decides at start-up")
    command.configure(parser)
    args = parser.parse(rest)
    args.command_line = [*prog.split(), name, *rest]
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="%(levelname)s %(message)s")
    code: int = command.run(args)
    return code


def _index(prog: str, description: str | None, commands: Mapping[str, str]) -> Parser:
    """What answers `--help` where a command has to follow."""
    is_root = prog == "ostinato"
    lines = "\n".join(f"  {name:<10} {what}" for name, what in commands.items())
    parser = Parser(
        prog=prog,
        usage=f"{prog} COMMAND ... | --help" + (" | --version" if is_root else ""),
        description=description,
        epilog=f"commands ({prog} COMMAND --help for the options of each):\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if is_root:
        parser.add_argument("--version", action="version", version=f"ostinato {ostinato.__version__}")
    return parser
