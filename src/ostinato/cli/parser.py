"""An argument parser whose errors are exceptions and name the nearest option."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from ostinato.errors import ConfigError


class UsageError(ConfigError):
    """The command line cannot be understood."""


class Parser(argparse.ArgumentParser):
    """Options may stand before, between and after the positional arguments, and may not be abbreviated."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _Formatter)
        super().__init__(allow_abbrev=False, **kwargs)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Raises UsageError; leaves through SystemExit for `--help` and `--version` only."""
        # The ordinary parser gives all positionals away at the first one, so `MODEL --top-k 5 PROMPT` would fail.
        namespace, extra = self.parse_known_intermixed_args(list(argv))
        unknown = [word for word in extra if word != "--"]
        if unknown:
            known = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
            raise UsageError(f"{self.prog}: " + explain_unknown("option", unknown[0].split("=")[0], known, self.prog))
        return namespace

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message} (see {self.prog} --help)")


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)


def explain_unknown(kind: str, word: str, known: Iterable[str], prog: str) -> str:
    """One line: what is unknown, and the nearest that is known."""
    by_name = {name.lstrip("-"): name for name in known}
    near = difflib.get_close_matches(word.lstrip("-"), by_name, n=1, cutoff=0.5)
    hint = f"did you mean {by_name[near[0]]}?" if near else f"see {prog} --help"
    return f"unknown {kind} {word}: {hint}"
