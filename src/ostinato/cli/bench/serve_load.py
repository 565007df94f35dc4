"""What a load test sends and when: arrivals, lengths, prompts, bodies. All of it follows from the seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ostinato.errors import ConfigError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

LOWEST_ID = 10
"""Ids below are left out of prompts: vocabularies begin with special tokens."""

_COMMON = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you
were her all she there would their we him been has when who will more no if out so said what up its about into than them
can only other new some could time these two may then do first any my now such like our over man me even most made after
also many before must through back where much your way well down should because each just those people how too little
good very make world still own see men work long get here between both life being under never day same another know
while last might us great old year off come since against go came right used take
"""
_WORDS = tuple(_COMMON.split())
"""Words so common that they are one token of nearly every vocabulary."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request: when it is due, in seconds from the start, and its body."""

    index: int
    due_s: float
    output_len: int
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    """The options that decide what is sent. `vocab_size` asks for prompts of token ids instead of words."""

    model: str
    endpoint: str
    num_prompts: int
    input_len: int
    output_len: int
    range_ratio: float = 0.0
    request_rate: float = float("inf")
    seed: int = 0
    vocab_size: int | None = None
    ignore_eos: bool = True
    temperature: float = 0.0
    extra_body: Mapping[str, Any] | None = None


def make_jobs(load: Load) -> list[Job]:
    """The requests, in the order of their arrival."""
    lengths = _stream(load.seed, "lengths")
    words = _stream(load.seed, "prompts")
    jobs = []
    for index, due_s in enumerate(arrivals(load.num_prompts, load.request_rate, load.seed)):
        input_len = draw_length(lengths, load.input_len, load.range_ratio)
        output_len = draw_length(lengths, load.output_len, load.range_ratio)
        prompt = draw_prompt(words, input_len, load.vocab_size)
        jobs.append(Job(index, due_s, output_len, make_body(load, prompt, output_len)))
    return jobs


def make_warm_up(load: Load, number: int) -> Job:
    """A request like the others, whose prompt is none of theirs: a prefix cache must not know it."""
    words = _stream(load.seed, f"warm-up {number}")
    prompt = draw_prompt(words, load.input_len, load.vocab_size)
    return Job(number, 0.0, load.output_len, make_body(load, prompt, load.output_len))


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds at which requests arrive: a Poisson process of `rate` a second that begins with an arrival at 0.

    The gaps are left as drawn, so the rate of one short schedule differs from `rate` as chance has it. An infinite rate
    means that all arrive at 0.
    """
    if rate == float("inf"):
        return [0.0] * count
    rng = _stream(seed, "arrivals")
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times


def draw_length(rng: random.Random, length: int, range_ratio: float) -> int:
    """Uniform within `range_ratio` of `length`, at least 1."""
    return rng.randint(max(1, round(length * (1 - range_ratio))), max(1, round(length * (1 + range_ratio))))


def draw_prompt(rng: random.Random, num_tokens: int, vocab_size: int | None) -> str | list[int]:
    if vocab_size is None:
        return " ".join(rng.choices(_WORDS, k=num_tokens))
    return rng.choices(range(min(LOWEST_ID, vocab_size - 1), vocab_size), k=num_tokens)


def make_body(load: Load, prompt: str | list[int], output_len: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": load.model,
        "temperature": load.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.endpoint == CHAT:
        if not isinstance(prompt, str):
            raise ConfigError(f"--token-ids: chat messages are text; use --endpoint {COMPLETIONS}")
        body |= {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": output_len}
    else:
        body |= {"prompt": prompt, "max_tokens": output_len}
    if load.ignore_eos:
        body["ignore_eos"] = True
    return body | dict(load.extra_body or {})


def _stream(seed: int, purpose: str) -> random.Random:
    """A generator of its own for each purpose, so that another rate changes no prompt."""
    return random.Random(f"{seed} {purpose}")
