"""What a request's output must look like, as the set of tokens that may come next. By llguidance, on first use.

A grammar follows one sequence: `mask` before a token is drawn, `accept` with the one that was. No torch.
"""

from __future__ import annotations

import importlib
import json
import re
import threading
from typing import TYPE_CHECKING, Any

from ostinato.errors import ConfigError, OstinatoError
from ostinato.request import StructuredOutputsParams

if TYPE_CHECKING:
    from ostinato.tokenizer.tokenizer import Tokenizer

_JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x09]{0,16}"}
"""Of a JSON schema, if it does not say otherwise: some models would go on with white space for ever."""


class Grammar:
    """One sequence's place in a grammar. `num_bytes` of a mask: a bit for each token of the model's vocabulary, the
    lowest bit of the first byte for token 0, in whole 32-bit words."""

    def __init__(self, matcher: Any, num_bytes: int) -> None:
        self._matcher, self._num_bytes = matcher, num_bytes

    def mask(self) -> bytes:
        """The tokens that may come next; all of them once the grammar has become too complex to follow, of which
        `accept` then tells."""
        mask: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            return b"\xff" * self._num_bytes
        return mask[: self._num_bytes].ljust(self._num_bytes, b"\0")

    def accept(self, token_id: int) -> bool:
        """Goes on by a token; false when that ends the output. Raises OstinatoError if it was not allowed."""
        if not self._matcher.consume_token(token_id):
            self._check()
            raise OstinatoError(f"token {token_id} is not allowed by the structure that was asked for")
        return not self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise OstinatoError(f"the structure that was asked for cannot be followed: {self._matcher.get_error()}")


class GrammarCompiler:
    """Makes grammars over one model's vocabulary. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, sorted(eos_token_ids)
        self._tokens: Any = None  # the library's view of the vocabulary, which takes a second to make
        self._lock = threading.Lock()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """A fresh grammar. Raises ConfigError for one that is malformed, or if llguidance is not installed."""
        library = self._library()
        try:
            source = _source(library.LLMatcher, params)
        except ValueError as error:
            raise _refused(str(error)) from error
        with self._lock:
            if self._tokens is None:
                self._tokens = library.LLTokenizer(
                    self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=self._eos
                )
        matcher = library.LLMatcher(self._tokens, source, log_level=0)
        if matcher.is_error():
            raise _refused(matcher.get_error())
        return Grammar(matcher, -(-self._vocab_size // 32) * 4)

    def _library(self) -> Any:
        if not self._eos:
            raise ConfigError(
                "structured outputs need a model with an end-of-sequence token", field="structured_outputs"
            )
        try:
            return importlib.import_module("llguidance")
        except ImportError as error:
            raise ConfigError(
                "structured outputs need the package llguidance: pip install llguidance", field="structured_outputs"
            ) from error


def _source(matcher: Any, params: StructuredOutputsParams) -> str:
    if params.choice is not None:
        return str(matcher.grammar_from_regex("|".join(re.escape(text) for text in params.choice)))
    if params.regex is not None:
        return str(matcher.grammar_from_regex(params.regex))
    if params.grammar is not None:
        return str(matcher.grammar_from_lark(params.grammar))
    schema = {"type": "object"} if params.json is None else params.json
    schema = schema if isinstance(schema, str) else json.dumps(schema)
    return str(matcher.grammar_from_json_schema(schema, defaults=_JSON_OPTIONS))


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"structured_outputs cannot be compiled: {reason.strip()}", field="structured_outputs")
