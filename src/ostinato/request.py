"""What a caller asks for, what it gets back, and what the scheduler keeps about it in between. No torch."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ostinato.errors import ConfigError

MAX_LOGPROBS = 20
"""Most alternatives a row can ask for with `logprobs` or `prompt_logprobs` (OpenAI's limit too)."""

MAX_LOGIT_BIAS = 300
"""Most entries in `logit_bias` (OpenAI's limit too): the device keeps a table of this width per row."""

MAX_STOP_IDS = 64
"""Most token ids that can end a request (eos ids and `stop_token_ids` together), for the same reason."""


class TokenGrammar(Protocol):
    """Which tokens may come next in one sequence (`sampling.grammar`)."""

    def mask(self) -> bytes:
        """A bit for each token of the vocabulary, in 32-bit words, the lowest one first."""

    def accept(self, token_id: int) -> bool:
        """Goes on by a token; false when that ends the output. Raises OstinatoError if it was not allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What the output must look like: exactly one of these. Names are vLLM's.

    `json` is a schema (JSON text or a dict), `json_object` any object, `regex` what the whole output matches, `choice`
    texts of which it is one, `grammar` a grammar in Lark's notation. `structural_tag` is JSON text of the form
    `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`: free text, in which what begins with a trigger
    goes on as one of the structures.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        names = ("json", "regex", "choice", "grammar", "structural_tag")
        given = [name for name in names if getattr(self, name) is not None]
        given += ["json_object"] * bool(self.json_object)
        if len(given) != 1:
            named = ", ".join(given) or "none"
            raise ConfigError(
                "StructuredOutputsParams takes one of json, regex, choice, grammar, json_object and structural_tag, "
                f"got {named}",
                field="structured_outputs",
            )
        if self.choice is not None and (isinstance(self.choice, str) or not all(self.choice) or not self.choice):
            raise ConfigError("StructuredOutputsParams.choice must be a list of texts", field="structured_outputs")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Names and defaults are vLLM's.

    `temperature=0` is greedy. `top_k` of 0 or -1 keeps the whole vocabulary. `max_tokens=None` goes on to the model
    length. `seed=None` draws one from the engine's seed and the request's number, so a run repeats as a whole.
    Raises ConfigError for a value out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise ConfigError(f"SamplingParams.{name}={getattr(self, name)!r}: must be {rule}", field=name)

        need(self.n >= 1, "n", "at least 1")
        need(0.0 <= self.temperature <= 100.0, "temperature", "between 0 (greedy) and 100")
        need(0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]")
        need(self.top_k >= -1, "top_k", "-1 or 0 (off) or the number of tokens to keep")
        need(0.0 <= self.min_p <= 1.0, "min_p", "between 0 and 1")
        need(0.0 < self.repetition_penalty < float("inf"), "repetition_penalty", "above 0 (1 is off)")
        need(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "between -2 and 2")
        need(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "between -2 and 2")
        need(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1, or None for the model's limit")
        need(self.min_tokens >= 0, "min_tokens", "at least 0")
        need(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"at most max_tokens ({self.max_tokens})",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            need(value is None or 0 <= value <= MAX_LOGPROBS, name, f"between 0 and {MAX_LOGPROBS}")
        bias = self.logit_bias or {}
        if len(bias) > MAX_LOGIT_BIAS:
            raise ConfigError(
                f"SamplingParams.logit_bias has {len(bias)} entries: at most {MAX_LOGIT_BIAS} are kept per row",
                field="logit_bias",
            )
        if any(token < 0 for token in bias):
            raise ConfigError("SamplingParams.logit_bias has a negative token id", field="logit_bias")
        if any(not text for text in self.stop_strings):
            raise ConfigError(
                "SamplingParams.stop has an empty string, which would stop before the first token", field="stop"
            )

        if self.structured_outputs is not None and self.min_tokens:
            raise ConfigError(
                f"SamplingParams.min_tokens={self.min_tokens}: with structured_outputs the structure says when the "
                "output ends",
                field="min_tokens",
            )

    def for_answer(self, index: int) -> SamplingParams:
        """Those of one of the `n` answers: its own seed, so that answers differ."""
        if self.n == 1:
            return self
        return dataclasses.replace(self, n=1, seed=None if self.seed is None else self.seed + index)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"  # it has its blocks, and a connector loads into them
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an eos or stop id, or a stop string
    LENGTH = "length"  # max_tokens or the model length
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence, from arrival to finish. The scheduler owns it; nobody else writes to it.

    `tokens` are the ids the host knows: prompt, then outputs as they are collected. `num_computed` counts the tokens
    whose KV has been *planned* (it runs ahead of what is collected when steps are in flight), and `num_in_flight` the
    planned samples that have not been collected: `len(tokens) + num_in_flight` is the length once all are. `max_length`
    is the length at which it ends, `kv_capacity` how many tokens its block table holds.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    priority: int = 0  # smaller is served first, as in vLLM
    arrival: int = 0  # order of arrival, the tie-break
    status: RequestStatus = RequestStatus.WAITING
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_in_flight: int = 0
    max_length: int = 0
    kv_capacity: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    slot: int | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    grammar: TokenGrammar | None = None

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[len(self.prompt_token_ids) :]

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token under the raw (unpenalised, untempered) distribution; rank 1 is the likeliest."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
