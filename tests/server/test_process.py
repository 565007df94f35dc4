"""The process: `ostinato serve` as people start and stop it, and what its exit code says."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ostinato import LLM, SamplingParams

from ..e2e.models import TinyModel
from .breaking import SLOW_S
from .running import LONGEST_S, SMALL, ServerProcess, server_process

OPTIONS = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def serve(model: TinyModel | Path, *words: str) -> list[str]:
    path = model.path if isinstance(model, TinyModel) else model
    return ["-m", "ostinato.cli", "serve", str(path), "--port", "0", "--served-model-name", "tiny", *OPTIONS, *words]


def serve_and_break(model: TinyModel, num_steps: int, kind: str | Path) -> list[str]:
    """See `breaking`."""
    return ["-m", "tests.server.breaking", str(num_steps), str(kind), *serve(model)[2:]]


async def stream(url: str, prompt: list[int], max_tokens: int, begun: asyncio.Event) -> str:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=LONGEST_S) as client:
        text = ""
        chunks = await client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in chunks:
            text += chunk.choices[0].text
            begun.set()
        return text


def test_sigterm_drains_and_loses_nothing(model: TinyModel, offline: LLM, tmp_path: Path) -> None:
    """20 streams over 8 rows, so that some still wait when the signal comes; a newcomer gets 503. Exit code 0. Steps
    are slow until all that was looked at."""
    looked = tmp_path / "looked"
    prompts = [[index + 1] * (3 + index) for index in range(20)]
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    expected = [output.outputs[0].text for output in offline.generate(prompts, params)]
    late: list[int] = []

    async def drive(server: ServerProcess) -> list[str]:
        begun = asyncio.Event()
        calls = [asyncio.create_task(stream(server.url, prompt, 100, begun)) for prompt in prompts]
        await begun.wait()
        async with httpx.AsyncClient(base_url=server.url, timeout=LONGEST_S) as client:
            # all are in before the signal: accepted
            while _open(await client.get("/metrics")) < len(prompts):
                await asyncio.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            while (health := (await client.get("/health")).json()["status"]) != "draining":
                assert health == "ok"
            response = await client.post("/v1/completions", json={"prompt": "late"})
            late.append(response.status_code)
        looked.touch()
        return await asyncio.gather(*calls)

    with server_process(serve_and_break(model, 0, looked)) as server:
        server.wait_ready()
        texts = asyncio.run(drive(server))
        assert server.wait_exit() == 0
    assert texts == expected
    assert late == [503]
    assert "SIGTERM: draining" in server.log
    assert "Traceback" not in server.log


def _open(metrics: httpx.Response) -> float:
    lines = metrics.text.splitlines()
    return sum(
        float(line.split()[-1])
        for line in lines
        if line.startswith(("ostinato:num_requests_running", "ostinato:num_requests_waiting"))
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_stops_at_once(model: TinyModel, number: signal.Signals, tmp_path: Path) -> None:
    """An answer that would take minutes more is cut off, and the exit code says that a signal ended the process."""
    body = {"prompt": "x", "max_tokens": 180, "ignore_eos": True, "stream": True, "n": 64}
    assert body["n"] / SMALL["max_num_seqs"] * body["max_tokens"] * SLOW_S > 3 * LONGEST_S
    with server_process(serve_and_break(model, 0, tmp_path / "never")) as server:
        server.wait_ready()
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=LONGEST_S) as response:
            assert response.status_code == 200
            signal_twice(server, number)
            assert server.wait_exit() == 128 + number
    assert "draining 64 requests" in server.log
    assert "stopping at once" in server.log


def signal_twice(server: ServerProcess, number: signal.Signals, after: str = "draining") -> None:
    """Two signals of one number that come too close together are one to the process: the first is seen first."""
    server.process.send_signal(number)
    server.wait_log(after)
    server.process.send_signal(number)


def test_an_engine_fault_fails_open_requests_and_ends_the_process(model: TinyModel) -> None:
    """Streams hear it in the stream, others as a 500; the exit code is not 0."""
    with server_process(serve_and_break(model, 12, "raise")) as server:
        server.wait_ready()

        async def drive() -> list[Any]:
            async with openai.AsyncOpenAI(
                base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=LONGEST_S
            ) as client:
                whole = [
                    client.completions.create(model="tiny", prompt=[5], max_tokens=99, extra_body={"ignore_eos": True})
                    for _ in range(3)
                ]
                streams = [stream(server.url, [6], 99, asyncio.Event()) for _ in range(3)]
                return await asyncio.gather(*whole, *streams, return_exceptions=True)

        *whole, first, second, third = asyncio.run(drive())
        for error in whole:
            assert isinstance(error, openai.InternalServerError), error
            assert "illegal memory access" in str(error)
        for error in (first, second, third):
            assert isinstance(error, openai.APIError), error
            assert "the engine has failed" in str(error)
        assert server.wait_exit() == 1
    assert "illegal memory access" in server.log


def test_a_step_that_hangs_does_not_keep_the_process(model: TinyModel) -> None:
    body = {"prompt": [5], "max_tokens": 99, "ignore_eos": True, "stream": True}
    with server_process(serve_and_break(model, 3, "hang")) as server:
        server.wait_ready()
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=LONGEST_S) as response:
            assert response.status_code == 200
            server.wait_log("a step hangs")
            assert httpx.get(f"{server.url}/health", timeout=LONGEST_S).status_code == 200  # the loop is not held up
            signal_twice(server, signal.SIGTERM)
            assert server.wait_exit() == 128 + signal.SIGTERM
    assert "draining 1 requests" in server.log
    assert "left behind" in server.log


def test_nor_does_one_whose_client_has_left(model: TinyModel) -> None:
    """Nothing is open, so the first signal has the engine closed, and that is what the second one finds."""
    body = {"prompt": [5], "max_tokens": 99, "ignore_eos": True, "stream": True}
    with server_process(serve_and_break(model, 3, "hang")) as server:
        server.wait_ready()
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=LONGEST_S) as response:
            assert response.status_code == 200
            server.wait_log("a step hangs")
        signal_twice(server, signal.SIGTERM, after="closing the engine")
        assert server.wait_exit() == 128 + signal.SIGTERM
    assert "left behind" in server.log


def test_a_start_that_fails_says_why(model: TinyModel, tmp_path: Path) -> None:
    """Wrong weights are found while the server listens already; exit code 2, one line."""
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(model.path, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with server_process(serve(broken)) as server:
        assert server.wait_exit() == 2
    errors = [line for line in server.lines if line.startswith("ostinato: error: ")]
    assert len(errors) == 1
    assert "model.layers.2" in server.log
    assert "Traceback" not in server.log


def test_the_address_and_the_key_from_the_environment(
    model: TinyModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ostinato.cli.main import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = ["serve", str(model.path), "--port", str(taken.getsockname()[1])]
        assert main(words) == 2
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err
    monkeypatch.setenv("OSTINATO_API_KEY", "from the environment")
    with server_process(serve(model, "--log-level", "debug")) as server:
        server.wait_ready()
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        # the address next to it is this machine's too, and would be answered if all were
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url.replace("127.0.0.1", "127.0.0.2"), timeout=LONGEST_S)
        headers = {"Authorization": "Bearer from the environment"}
        assert httpx.get(f"{server.url}/v1/models", headers=headers).json()["data"][0]["id"] == "tiny"
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
    assert '"GET /v1/models HTTP/1.1" 401' in server.log
    assert "from the environment" not in server.log


def test_sleep_mode_is_an_option(model: TinyModel) -> None:
    with server_process(serve(model, "--enable-sleep-mode")) as server:
        server.wait_ready()
        assert httpx.post(f"{server.url}/sleep?level=2", timeout=LONGEST_S).status_code == 200
        assert httpx.get(f"{server.url}/is_sleeping", timeout=LONGEST_S).json() == {"is_sleeping": True}
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
    assert "asleep, level 2" in server.log


def test_sigterm_while_asleep_ends_open_requests(model: TinyModel, tmp_path: Path) -> None:
    """They cannot go on: streams are told in the stream, others by a 503. Exit code 0."""
    words = [*serve_and_break(model, 0, tmp_path / "never"), "--enable-sleep-mode"]
    body = {"prompt": [5], "max_tokens": 180, "ignore_eos": True}

    async def drive(server: ServerProcess) -> tuple[httpx.Response, list[str]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=LONGEST_S) as client:
            whole = asyncio.create_task(client.post("/v1/completions", json=body))
            async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                lines = response.aiter_lines()
                seen = [await anext(lines)]
                while _open(await client.get("/metrics")) < 2:
                    await asyncio.sleep(0.01)
                assert (await client.post("/sleep")).status_code == 200
                server.process.send_signal(signal.SIGTERM)
                seen += [line async for line in lines if line]
            return await whole, seen

    with server_process(words) as server:
        server.wait_ready()
        whole, lines = asyncio.run(drive(server))
        assert server.wait_exit() == 0
    assert whole.status_code == 503
    assert whole.headers["retry-after"] == "1"
    *_, last, done = lines
    assert done == "data: [DONE]"
    for error in (whole.json()["error"], json.loads(last.removeprefix("data: "))["error"]):
        assert error["code"] == "unavailable"
        assert "shutting down while the engine sleeps (no kv_cache, no weights)" in error["message"]
    assert "draining 2 requests" in server.log
    assert "Traceback" not in server.log
