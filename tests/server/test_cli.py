"""The command's own options."""

from __future__ import annotations

import importlib.util

import pytest

from ostinato.cli import serve
from ostinato.cli.main import main
from ostinato.cli.options import byte_size
from ostinato.engine.async_engine import DEFAULT_MAX_QUEUE
from ostinato.server.serving import DEFAULT_MAX_BODY_BYTES
from ostinato.server.tools.syntax import SYNTAXES


def test_defaults_are_those_of_the_parts() -> None:
    """Written twice, because the help must not import torch."""
    assert serve.MAX_QUEUE == DEFAULT_MAX_QUEUE
    assert byte_size(serve.MAX_BODY) == DEFAULT_MAX_BODY_BYTES


def test_missing_packages_are_named_with_the_way_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fastapi" else find(name))
    assert main(["serve", "M"]) == 2
    assert "serve needs fastapi: pip install 'ostinato[server]'" in capsys.readouterr().err


def test_tool_call_parsers_are_those_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(serve.TOOL_CALL_PARSERS) == set(SYNTAXES)
    assert main(["serve", "M", "--enable-auto-tool-choice"]) == 2
    assert "--enable-auto-tool-choice needs --tool-call-parser hermes or llama3_json" in capsys.readouterr().err
