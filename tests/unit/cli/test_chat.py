"""A conversation, its interruption and its commands, on an engine of a few lines."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from ostinato.cli.chat import Conversation
from ostinato.engine.output import Delta
from ostinato.errors import ConfigError
from ostinato.request import SamplingParams


class FakeLLM:
    """Answers with the words given. `at_word` runs before each; `closed` counts streams that were ended."""

    def __init__(self, words: Sequence[str] = ("one ", "two ", "three")) -> None:
        self.words = words
        self.at_word: Callable[[int], None] = lambda index: None
        self.prompts: list[Any] = []
        self.closed = 0

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> list[dict[str, str]]:
        if messages[-1]["content"] == "too long":
            raise ConfigError("300 tokens, and the model has 256 positions")
        self.prompts.append([dict(message) for message in messages])
        return list(messages)

    def stream(self, prompt: object, params: SamplingParams) -> Iterator[Delta]:
        try:
            for index, word in enumerate(self.words):
                self.at_word(index)
                yield Delta("r", (index,), word, finished=index == len(self.words) - 1)
        finally:
            self.closed += 1


def script(*lines: str | type[BaseException]) -> Callable[[str], str]:
    waiting = list(lines)

    def read(prompt: str) -> str:
        line = waiting.pop(0) if waiting else EOFError
        if isinstance(line, str):
            return line
        raise line

    return read


def talk(llm: FakeLLM, *lines: str | type[BaseException], system: str | None = None) -> Conversation:
    conversation = Conversation(llm, SamplingParams(), system, script(*lines))  # type: ignore[arg-type]
    conversation.loop()
    return conversation


def roles(conversation: Conversation) -> list[str]:
    return [message["role"] for message in conversation.messages]


def test_keeps_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM()
    conversation = talk(llm, "hello", "  ", "and then?", system="be brief")
    assert capsys.readouterr().out.splitlines()[:2] == ["one two three"] * 2
    assert roles(conversation) == ["system", "user", "assistant", "user", "assistant"]
    assert conversation.messages[2]["content"] == "one two three"
    assert len(llm.prompts[1]) == 4


def test_ctrl_c_stops_the_answer_and_keeps_what_came(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM()
    llm.at_word = lambda index: signal.raise_signal(signal.SIGINT) if index == 1 else None
    before = signal.getsignal(signal.SIGINT)
    conversation = talk(llm, "hello")
    assert conversation.messages[-1] == {"role": "assistant", "content": "one two "}
    assert "one two  [stopped]" in capsys.readouterr().out
    assert llm.closed == 1
    assert signal.getsignal(signal.SIGINT) is before
    llm.at_word = lambda index: None
    conversation.say("go on")
    assert roles(conversation) == ["user", "assistant"] * 2


def test_a_second_ctrl_c_gets_through() -> None:
    llm = FakeLLM()

    def twice(index: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    llm.at_word = twice
    with pytest.raises(KeyboardInterrupt):
        talk(llm, "hello")
    assert llm.closed == 1


def test_ctrl_c_at_the_prompt_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert roles(talk(FakeLLM(), KeyboardInterrupt, "hello")) == ["user", "assistant"]
    assert "/exit ends" in capsys.readouterr().err


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM()
    conversation = talk(llm, "hello", "/nonesuch", "/reset", "again", "/exit", "never", system="be brief")
    assert "unknown command /nonesuch" in capsys.readouterr().err
    assert roles(conversation) == ["system", "user", "assistant"]
    assert [prompt[-1]["content"] for prompt in llm.prompts] == ["hello", "again"]


def test_a_refused_turn_leaves_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = talk(FakeLLM(), "hello", "too long", "shorter")
    assert "256 positions; /reset begins anew" in capsys.readouterr().err
    assert [message["content"] for message in conversation.messages if message["role"] == "user"] == [
        "hello",
        "shorter",
    ]
