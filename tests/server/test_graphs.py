"""The endpoints of the page: the engine's own numbers, whole and current."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ostinato import LLM, SamplingParams
from ostinato.engine.stream import Submission
from ostinato.kv.block_pool import BlockPool

from .running import LONGEST_S, Running


def complete(server: Running, **options: Any) -> None:
    body = {"prompt": "watch the graphs", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    assert server.post("/v1/completions", body | options).status_code == 200


def test_state(server: Running) -> None:
    complete(server)
    server.wait_idle()
    stats = server.between_steps(lambda llm: llm.stats())
    state = server.get("/graphs/state").json()
    assert {name: state[name] for name in ("model", "mode", "backend", "device", "dtype")} == {
        "model": "tiny",
        "mode": "FULL_AND_PIECEWISE",
        "backend": "tape",
        "device": "cpu",
        "dtype": "float32",
    }
    assert (state["block_size"], state["num_blocks"], state["max_model_len"]) == (16, 64, 192)
    assert state["ladder"] == {"uniform": list(stats.capture_sizes), "mixed": list(stats.mixed_capture_sizes)}
    assert len(state["recordings"]) == stats.num_recordings
    assert set(state["recordings"][0]) == {
        "mode",
        "num_tokens",
        "num_rows",
        "query_len",
        "num_graphs",
        "num_nodes",
        "seconds",
        "bytes",
    }
    assert sum(row["count"] for row in state["counters"]) == sum(step.count for step in stats.steps) > 0
    decode = next(row for row in state["counters"] if row["mode"] == "FULL")
    assert decode["key"] == [1, 1, 1]
    assert decode["reason"] == "exact"
    assert decode["live_tokens"] == decode["padded_tokens"] == decode["count"]
    memory = state["memory"]
    assert memory["weights"] > 0
    assert memory["kv"] == 64 * 16 * 2 * 2 * 2 * 16 * 4  # blocks, tokens, layers, K and V, heads, head size, float32
    assert memory["buffers"] > 0
    assert memory["total"] is None


def test_steps_go_on_where_the_reader_was(server: Running) -> None:
    server.wait_idle()
    last = server.get("/graphs/steps").json()["last"]
    before = time.time() * 1e3
    complete(server, max_tokens=8)
    after = time.time() * 1e3
    told = server.get(f"/graphs/steps?after={last}").json()
    steps = told["steps"]
    assert [step["id"] for step in steps] == list(range(last + 1, told["last"] + 1))
    assert len(steps) == 8
    assert steps[0]["mode"] == "PIECEWISE"
    assert steps[0]["reason"] == "mixed batch: piecewise"
    assert (steps[0]["rows"], steps[0]["tokens"]) == (1, 16)
    assert steps[0]["padded_tokens"] == steps[0]["key"][0] >= 16
    assert [(step["mode"], step["key"], step["tokens"]) for step in steps[1:]] == [("FULL", [1, 1, 1], 1)] * 7
    times = [at for step in steps for at in (step["launched_ms"], step["collected_ms"])]
    assert times == sorted(times)
    assert before - 50 < times[0] < times[-1] < after + 50
    nothing = server.get(f"/graphs/steps?after={told['last']}").json()
    assert nothing == {"last": told["last"], "steps": []}


def test_at_most_512_steps_are_kept(server: Running) -> None:
    for _ in range(4):
        complete(server, max_tokens=150)
    told = server.get("/graphs/steps").json()
    assert len(told["steps"]) == 512
    assert told["steps"][-1]["id"] == told["last"] > 512


def test_pool_and_requests(server: Running) -> None:
    """Two that run: their tables are disjoint, and exactly their blocks are used."""
    server.wait_idle()
    complete(server, prompt="fill two blocks and leave them in the cache")

    async def look() -> tuple[Any, Any]:
        import httpx

        params = SamplingParams(max_tokens=150, ignore_eos=True)
        submissions = [Submission(f"r{index}", [index + 1] * 20, params) for index in range(2)]
        with await server.engine.submit(submissions) as stream:
            await anext(stream)
            release = server.loop.create_future()
            # the engine waits in a call, so both answers are of the same moment
            import asyncio
            import threading

            gate = threading.Event()
            async with httpx.AsyncClient(base_url=server.url, timeout=LONGEST_S) as client:
                hold = asyncio.create_task(server.engine.call(lambda llm: gate.wait(LONGEST_S)))
                pool = asyncio.create_task(client.get("/graphs/pool"))
                requests = asyncio.create_task(client.get("/graphs/requests"))
                while len(server.engine._calls) < 3:
                    await asyncio.sleep(0.005)
                gate.set()
                answers = (await pool).json(), (await requests).json()
                await hold
            release.set_result(None)
            return answers

    pool, requests = server.on_loop(look)
    assert pool["num_blocks"] == len(pool["states"]) == 64
    assert pool["states"][0] == "s"
    assert pool["states"].count("s") == 1
    assert pool["states"].count("c") >= 2
    assert set(pool["states"]) <= set("sfuc")
    assert [request["id"] for request in requests] == ["r0", "r1"]
    for request in requests:
        assert request["status"] == "running"
        assert request["prompt_tokens"] == 20
        assert request["output_tokens"] >= 1
        assert len(request["blocks"]) >= 2
    blocks = [block for request in requests for block in request["blocks"]]
    assert len(set(blocks)) == len(blocks)
    assert {index for index, letter in enumerate(pool["states"]) if letter == "u"} <= set(blocks)
    server.wait_idle()
    assert server.get("/graphs/requests").json() == []
    assert "u" not in server.get("/graphs/pool").json()["states"]


def test_states_of_blocks() -> None:
    pool = BlockPool(6)
    first, second, third = pool.allocate(3)
    pool.register(first, b"a")
    pool.free([first, second])
    states = pool.states()
    letters = states.letters()
    assert [letters[block] for block in (0, first, second, third)] == ["s", "c", "f", "u"]
    assert letters.count("f") == 3
    assert states.num_used == 1
    pool.allocate(4)
    assert states.letters() == letters


def test_the_page(server: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from ostinato.server.routes import page

    response = server.get("/")
    assert response.status_code == (200 if (page.STATIC / "index.html").is_file() else 404)
    monkeypatch.setattr(page, "STATIC", tmp_path)
    missing = server.get("/")
    assert missing.status_code == 404
    assert "/v1" in missing.json()["error"]["message"]
    (tmp_path / "index.html").write_text("<p>here</p>")
    found = server.get("/")
    assert (found.status_code, found.text) == (200, "<p>here</p>")
    assert found.headers["Content-Type"].startswith("text/html")


def test_an_offline_engine_has_no_log(offline: LLM) -> None:
    """Who does not serve does not pay."""
    assert offline.engine.runner._observer is None
