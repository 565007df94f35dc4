"""What a request's output must look like, as the set of tokens that may come next. By llguidance, on first use.

A grammar follows one sequence: `mask` before a token is drawn, `accept` with the one that was. No torch.
"""

from __future__ import annotations

import importlib
import json
import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ostinato.errors import ConfigError, OstinatoError
from ostinato.request import StructuredOutputsParams

if TYPE_CHECKING:
    from ostinato.tokenizer.tokenizer import Tokenizer

JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x09]{0,16}"}
"""Of a JSON schema, if it does not say otherwise: some models would go on with white space for ever."""

MAX_CHARS = 1 << 17
"""Longest schema, expression or grammar, or list of choices. The library bounds its own work, not its recursion: a
chain of rules takes a stack as deep as the chain is long, and this many characters fit `_STACK_BYTES` several times."""

_STACK_BYTES = 256 << 20
"""Address space for the stack of a compilation; what is not used is never backed by memory."""

_stack_size = threading.Lock()
"""Held while Python's setting for new threads, which is one for the process, is another."""


class Grammar:
    """One sequence's place in a grammar. `num_bytes` of a mask: a bit for each token of the model's vocabulary, the
    lowest bit of the first byte for token 0, in whole 32-bit words."""

    def __init__(self, matcher: Any, num_bytes: int) -> None:
        self._matcher, self._num_bytes = matcher, num_bytes

    def copy(self) -> Grammar:
        """The same place, for another sequence. Much cheaper than compiling again."""
        return Grammar(self._matcher.deep_copy(), self._num_bytes)

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
        """A fresh grammar. Raises ConfigError for one that is malformed, or too large, or if llguidance is not
        installed."""
        library = self._library()
        try:
            source = _source(library, params)
        except ValueError as error:
            raise _refused(str(error)) from error
        tokens = self._vocabulary(library)
        matcher = _on_deep_stack(lambda: library.LLMatcher(tokens, source, log_level=0))
        if matcher.is_error():
            raise _refused(matcher.get_error())
        return Grammar(matcher, -(-self._vocab_size // 32) * 4)

    def _vocabulary(self, library: Any) -> Any:
        with self._lock:
            if self._tokens is None:
                try:
                    self._tokens = library.LLTokenizer(
                        self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=self._eos
                    )
                except (TypeError, ValueError) as error:  # also how a release that is too old refuses the list
                    raise ConfigError(
                        f"llguidance cannot read this model's vocabulary (1.7 or later is needed): {error}",
                        field="structured_outputs",
                    ) from error
            return self._tokens

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


def _source(library: Any, params: StructuredOutputsParams) -> str:
    matcher = library.LLMatcher
    if params.choice is not None:
        return str(matcher.grammar_from_regex(_limited("|".join(re.escape(text) for text in params.choice))))
    if params.regex is not None:
        return str(matcher.grammar_from_regex(_limited(params.regex)))
    if params.grammar is not None:
        return str(matcher.grammar_from_lark(_limited(params.grammar)))
    if params.structural_tag is not None:
        return _tagged(library.StructTag, _limited(params.structural_tag))
    schema = {"type": "object"} if params.json is None else params.json
    schema = schema if isinstance(schema, str) else json.dumps(schema)
    return str(matcher.grammar_from_json_schema(_limited(schema), defaults=JSON_OPTIONS))


def _tagged(struct_tag: Any, text: str) -> str:
    """Free text in which each `begin` is followed by what fits its schema, and that by `end`. Raises ValueError."""
    try:
        wanted = json.loads(text)
        triggers = [str(trigger) for trigger in wanted["triggers"]]
        tags = []
        for one in wanted["structures"]:
            begin, schema = str(one["begin"]), one.get("schema") or {}
            trigger = next((trigger for trigger in triggers if trigger and begin.startswith(trigger)), None)
            if trigger is None:
                raise ValueError(f"structural_tag: {begin!r} begins with none of the triggers")
            if not isinstance(schema, dict):
                raise ValueError("structural_tag: a schema must be an object")
            options = {"x-guidance": JSON_OPTIONS} | schema
            tags.append(struct_tag(trigger=trigger, begin=begin, grammar=options, end=str(one.get("end", ""))))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            "structural_tag must be an object with 'structures', each with 'begin', 'schema' and 'end', and 'triggers'"
        ) from error
    if not tags:
        raise ValueError("structural_tag: 'structures' is empty")
    return str(struct_tag.to_grammar(tags, assume_special=False))


def _limited(text: str) -> str:
    if len(text) > MAX_CHARS:
        raise ValueError(f"it has {len(text)} characters, at most {MAX_CHARS} are taken")
    return text


def _on_deep_stack(function: Callable[[], Any]) -> Any:
    """Runs `function`, which must not raise, on a thread with room for deep recursion."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()), name="ostinato-grammar", daemon=True)
    with _stack_size:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return results[0]


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"structured_outputs cannot be compiled: {reason.strip()}", field="structured_outputs")
