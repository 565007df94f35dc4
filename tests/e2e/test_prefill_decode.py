"""`TcpConnector`: a producer in a process of its own, a consumer here; together they answer as one."""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec

import pytest

from ostinato.connectors.protocol import Wait
from ostinato.errors import ConfigError

from .conftest import TinyFactory
from .connecting import free_port, open_llm, serve_blocks, start, stats_of, tcp, tokens_of, until
from .driving import greedy
from .models import TinyModel, prompts_of

needs_nixl = pytest.mark.skipif(find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed")
LONG = prompts_of((70, 90, 80, 75), 160, seed=93)


@pytest.fixture(params=["tcp", pytest.param("nixl", marks=needs_nixl)])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(tiny_model: TinyFactory) -> TinyModel:
    return tiny_model("Qwen3", num_hidden_layers=3)


def test_two_processes_are_as_one(model: TinyModel, transport: str) -> None:
    """The client asks the producer for one token of each prompt, then the consumer for all of them. Both pools hold
    two prompts; the producer sees the prompts once more, and what its pool still has is served too."""
    port = free_port()
    producer, pipe = start(serve_blocks, model.path, port, None, transport)
    try:
        assert pipe.recv() == "ready"
        for wait in Wait:
            for mode in ("PIECEWISE", "FULL_AND_PIECEWISE"):
                transfer = tcp(port, "kv_consumer", wait=wait.value, transport=transport)
                with open_llm(model.path, transfer, cudagraph_mode=mode) as llm:
                    for prompt in LONG:
                        pipe.send(prompt)
                        expected = model.greedy(prompt, 5)
                        assert pipe.recv() == expected[:1]
                        output = llm.generate(prompt, greedy(5))[0]
                        assert list(output.outputs[0].token_ids) == expected
                        assert output.num_cached_tokens == (len(prompt) - 1) // 16 * 16
                    clients = llm._built.connector.scheduler._close.__self__._clients  # type: ignore[union-attr]
                    assert any(client._sock for client in clients), "connections are kept from fetch to fetch"
                    stats = stats_of(llm)
                    assert stats.fetched_blocks[transport] == sum(stats.fetched_blocks.values()) >= 16
                    assert (stats.deferred_requests, stats.failed_loads, stats.saved_blocks) == (4, 0, 0)
        pipe.send(None)
        produced = pipe.recv()
        assert produced.saved_blocks == 18, "each block once, however often it was computed"
        assert produced.failed_saves == 0
        producer.join(60)
        assert producer.exitcode == 0
    finally:
        producer.kill()


def test_a_prompt_that_the_producer_has_not_seen(model: TinyModel, transport: str) -> None:
    port = free_port()
    producer, pipe = start(serve_blocks, model.path, port, None, transport)
    try:
        assert pipe.recv() == "ready"
        with open_llm(model.path, tcp(port, "kv_consumer", transport=transport)) as llm:
            assert tokens_of(llm, LONG[0]) == model.greedy(LONG[0], 5)
            assert (stats_of(llm).hit_tokens, stats_of(llm).failed_loads) == (0, 0)
    finally:
        producer.kill()


def test_no_producer(model: TinyModel, transport: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is asked once, and then left alone for a while."""
    with open_llm(model.path, tcp(free_port(), "kv_consumer", transport=transport, retry_s=60)) as llm:
        for prompt in LONG:
            assert tokens_of(llm, prompt) == model.greedy(prompt, 5)
        assert stats_of(llm).failed_loads == 1
    assert "no connection to a block server" in caplog.text


def test_a_producer_killed_in_the_middle(model: TinyModel, transport: str, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    producer, pipe = start(serve_blocks, model.path, port, 3, transport)
    try:
        assert pipe.recv() == "ready"
        pipe.send(LONG[1])
        expected = model.greedy(LONG[1], 5)
        assert pipe.recv() == expected[:1]
        with open_llm(model.path, tcp(port, "kv_consumer", transport=transport, retry_s=60)) as llm:
            output = llm.generate(LONG[1], greedy(5))[0]
            assert list(output.outputs[0].token_ids) == expected
            # its memory goes with it: by NIXL, what had not been read by then does not come
            came = output.num_cached_tokens
            assert came == 32 if transport == "tcp" else came in (0, 16, 32)
            assert stats_of(llm).failed_loads == 1
            assert tokens_of(llm, LONG[0]) == model.greedy(LONG[0], 5)
        producer.join(60)
        assert producer.exitcode == -9
    finally:
        producer.kill()
    assert f"{came // 16} of 5 came" in caplog.text


def test_a_producer_that_hangs(model: TinyModel, transport: str) -> None:
    """It listens and says nothing."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as mute:
        transfer = tcp(mute.getsockname()[1], "kv_consumer", transport=transport, timeout_s=0.3, retry_s=60)
        with open_llm(model.path, transfer) as llm:
            begun = time.monotonic()
            assert tokens_of(llm, LONG[0]) == model.greedy(LONG[0], 5)
            assert time.monotonic() - begun < 30
            assert stats_of(llm).failed_loads == 1


def test_a_producer_of_another_model(model: TinyModel, transport: str, tiny_model: TinyFactory) -> None:
    other = tiny_model("Qwen3", num_hidden_layers=3, seed=1)
    port = free_port()
    producer, pipe = start(serve_blocks, model.path, port, None, transport)
    try:
        assert pipe.recv() == "ready"
        pipe.send(LONG[0])
        pipe.recv()
        with open_llm(other.path, tcp(port, "kv_consumer", transport=transport)) as llm:
            assert tokens_of(llm, LONG[0]) == other.greedy(LONG[0], 5)
            assert (stats_of(llm).hit_tokens, stats_of(llm).failed_loads) == (0, 1)
    finally:
        producer.kill()


@needs_nixl
@pytest.mark.parametrize("sides", [("tcp", "nixl"), ("nixl", "tcp")], ids=["producer-without", "consumer-without"])
def test_one_end_without_nixl(model: TinyModel, sides: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    producer, pipe = start(serve_blocks, model.path, port, None, sides[0])
    try:
        assert pipe.recv() == "ready"
        pipe.send(LONG[0])
        pipe.recv()
        with open_llm(model.path, tcp(port, "kv_consumer", transport=sides[1])) as llm:
            assert tokens_of(llm, LONG[0]) == model.greedy(LONG[0], 5)
            assert stats_of(llm).fetched_blocks == {"tcp": 4, "nixl": 0}
            assert stats_of(llm).failed_loads == 0
    finally:
        producer.kill()
    assert ("the server has no NIXL" in caplog.text) == (sides[1] == "nixl")


def test_nixl_that_is_not_installed(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu13", None)
    for role in ("kv_producer", "kv_consumer"):
        with pytest.raises(ConfigError, match="pip install nixl-cu13"):
            open_llm(model.path, tcp(free_port(), role, transport="nixl"))


def test_both_ends_get_other_weights(model: TinyModel, tiny_model: TinyFactory) -> None:
    """One that has them already finds nothing, and what the other end has saved before is not taken for theirs."""
    from ostinato.weights.checkpoint import open_checkpoint

    other = tiny_model("Qwen3", num_hidden_layers=3, seed=1)
    port, prompt = free_port(), LONG[0]
    weights = list(open_checkpoint(str(other.path)).tensors())
    with (
        open_llm(model.path, tcp(port, "kv_producer", transport="tcp")) as producer,
        open_llm(model.path, tcp(port, "kv_consumer", transport="tcp")) as consumer,
    ):
        tokens_of(producer, prompt, 1)
        until(lambda: stats_of(producer).saved_blocks == 4)
        consumer.update_weights(weights)
        output = consumer.generate(prompt, greedy(5))[0]
        assert list(output.outputs[0].token_ids) == other.greedy(prompt, 5)
        assert output.num_cached_tokens == 0

        consumer.update_weights(weights)  # its own prefix cache forgets
        producer.update_weights(weights)
        assert tokens_of(producer, prompt, 1) == other.greedy(prompt, 1)
        until(lambda: stats_of(producer).saved_blocks == 8)
        output = consumer.generate(prompt, greedy(5))[0]
        assert list(output.outputs[0].token_ids) == other.greedy(prompt, 5)
        assert output.num_cached_tokens == 64
        assert stats_of(consumer).failed_loads == 0
