"""One tiny model with a tokenizer and a chat template, one server over it for the tests that do no harm to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ostinato import LLM

from ..e2e.conftest import _one_thread  # noqa: F401 (a fixture of every test here too)
from ..e2e.models import TinyModel, build_tiny
from .running import SMALL, Running, running

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}[{{ name | default('assistant') }}]{% endif %}"
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Its tokens are the bytes of Latin text and its neighbours; id 0 ends a text."""
    folder = tmp_path_factory.mktemp("served")
    made = build_tiny(folder, "Llama", vocab_size=160, tokenizer=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return made


def open_llm(model: TinyModel, **options: Any) -> LLM:
    return LLM(str(model.path), **SMALL | options)


@pytest.fixture(scope="session")
def offline(model: TinyModel) -> Iterator[LLM]:
    """What the server must agree with."""
    with open_llm(model) as llm:
        yield llm


@pytest.fixture(scope="session")
def server(model: TinyModel) -> Iterator[Running]:
    with running(lambda: open_llm(model), model_names=["tiny", "also/tiny"]) as found:
        yield found


@pytest.fixture
def no_leaks(server: Running) -> Iterator[None]:
    """The test leaves the shared server as it found it."""
    server.wait_idle()
    before = server.num_tasks()
    yield
    server.assert_nothing_leaked(before + 8)  # idle connections of clients may stay open for a while
