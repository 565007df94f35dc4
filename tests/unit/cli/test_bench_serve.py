"""Load test of a server, end to end, against a scripted one. Nothing here depends on how long anything takes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ostinato.cli.main import main

web = pytest.importorskip("aiohttp.web", reason="bench serve needs aiohttp")

from ostinato.cli.bench import serve_plot  # noqa: E402
from ostinato.cli.bench.serve_client import Client, Target  # noqa: E402
from ostinato.cli.bench.serve_load import Job  # noqa: E402

KEY = "a-key-of-the-tests"


class FakeServer:
    """Answers a request with `max_tokens` tokens. `scripts` says otherwise for single requests, by arrival."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.scripts: dict[int, str] = {}
        self.gate_at = 0
        """With a number: no answer starts before so many requests are open."""
        self.held_until = 0
        """The first request is not answered before so many have arrived."""
        self.open = self.most_open = 0
        self._gate: asyncio.Event | None = None
        self._all_here: asyncio.Event | None = None
        self.url = ""

    def app(self) -> Any:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        return app

    async def _models(self, request: Any) -> Any:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"error": {"message": "who are you?"}}, status=401)
        return web.json_response({"object": "list", "data": [{"id": "tiny"}, {"id": "tiny-2"}]})

    async def _version(self, request: Any) -> Any:
        return web.json_response({"version": "1.2.3"})

    async def _answer(self, request: Any) -> Any:
        body = await request.json()
        script = self.scripts.get(len(self.bodies), "")
        self.bodies.append(body)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await self._wait()
            await self._hold()
            return await self._stream(request, body, script)
        finally:
            self.open -= 1

    async def _wait(self) -> None:
        if self._gate is None:
            self._gate = asyncio.Event()
        if self.open >= self.gate_at:
            self._gate.set()
        await self._gate.wait()

    async def _hold(self) -> None:
        if self._all_here is None:
            self._all_here = asyncio.Event()
            if self.held_until:
                await self._all_here.wait()
        elif len(self.bodies) == self.held_until:
            self._all_here.set()

    async def _stream(self, request: Any, body: dict[str, Any], script: str) -> Any:
        if script == "busy":
            error = {"error": {"message": "the queue is full", "type": "rate_limit_error"}}
            return web.json_response(error, status=429, headers={"Retry-After": "1"})
        if script == "whole":
            return web.json_response({"choices": [{"text": "at once"}]})
        count = body.get("max_tokens") or body["max_completion_tokens"]
        chat = request.path.endswith("/chat/completions")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def say(**choice: Any) -> None:
            chunk = {"choices": [{"index": 0, "finish_reason": None} | choice]}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())

        if chat:
            await say(delta={"role": "assistant", "content": ""})
        for number in range(count):
            last = "length" if number == count - 1 else None
            if script in ("cut", "fault") and number == 2:
                break
            text = f" {number}"
            await (say(delta={"content": text}, finish_reason=last) if chat else say(text=text, finish_reason=last))
        if script == "cut":
            await response.write_eof()
            return response
        if script == "fault":
            await response.write(b'data: {"error": {"message": "the engine stopped"}}\n\n')
        elif script != "no usage":
            words = json.dumps(body.get("prompt") or body["messages"])
            usage = {"prompt_tokens": len(words), "completion_tokens": count}
            await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """On a thread of its own, with a loop of its own."""
    fake = FakeServer()
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def start() -> Any:
        runner = web.AppRunner(fake.app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        fake.url = f"http://127.0.0.1:{port}"
        return runner

    def serve() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        started.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert started.wait(90)
    yield fake
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def bench(server: FakeServer, options: str, *more: str, code: int = 0) -> None:
    assert main(["bench", "serve", server.url, "--api-key", KEY, *options.split(), *more]) == code


def test_a_load_test(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "r.json", tmp_path / "r.png"
    pytest.importorskip("matplotlib")
    server.scripts = {4: "busy", 6: "cut", 9: "fault", 10: "whole", 12: "busy"}  # 0 and 1 are the warm-up
    options = "--num-prompts 12 --random-input-len 6 --random-output-len 5 --num-warmups 2 --request-rate 1000 "
    options += f"--goodput ttft:60000 tpot:60000 --json {file} --png {picture}"
    bench(server, options)
    report = json.loads(file.read_text())
    summary = report["summary"]
    assert len(server.bodies) == 14
    assert all(body["model"] == "tiny" and body["max_tokens"] == 5 and body["ignore_eos"] for body in server.bodies)
    assert (summary["num_requests"], summary["num_completed"], summary["output_tokens"]) == (12, 7, 35)
    sent = {body["prompt"]: len(json.dumps(body["prompt"])) for body in server.bodies[2:]}
    assert len(sent) == 12
    assert [(failure["reason"], failure["count"], failure["first"]) for failure in summary["failures"]] == [
        ("HTTP 429", 2, "the queue is full"),
        *sorted(
            [
                ("stream cut short", 1, "after 2 chunks"),
                ("error in the stream", 1, "the engine stopped"),
                ("not a stream", 1, "the answer is application/json"),
            ],
            key=lambda failure: [row["reason"] for row in summary["failures"]].index(failure[0]),
        ),
    ]
    assert summary["goodput"]["num_good"] == 7
    assert summary["goodput"]["share"] == pytest.approx(7 / 12)
    done = [row for row in report["requests"] if row["failure"] is None]
    assert len(report["requests"]) == 12 and len(done) == 7
    for row in done:
        assert row["due_s"] <= row["sent_s"] <= row["end_s"]
        assert 0 < row["ttft_ms"] <= row["e2el_ms"] <= 1e3 * (row["end_s"] - row["sent_s"])
        assert (row["output_tokens"], row["chunks"]) == (5, 5)
    for row in report["requests"]:
        assert (row["ttft_ms"] is None) == (row["failure"] is not None)
    assert [row["due_s"] for row in report["requests"]] == sorted(row["due_s"] for row in report["requests"])
    assert summary["ttft_ms"]["max"] == pytest.approx(max(row["ttft_ms"] for row in done))
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"):
        values = summary[name]
        assert values["min"] <= values["median"] <= values["p90"] <= values["p99"] <= values["max"]
    assert report["server"] == {"model": "tiny", "version": "1.2.3"}
    assert KEY not in file.read_text() and str(tmp_path) not in file.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "7 of 12 requests completed" in out and "the queue is full" in out and "(7 of 12)" in out


def test_all_at_once(server: FakeServer, tmp_path: Path) -> None:
    """The server waits until all of them are open; with fewer at once, none would ever be answered."""
    server.gate_at = 20
    bench(server, f"--num-prompts 20 --random-output-len 2 --num-warmups 0 --json {tmp_path / 'r.json'}")
    summary = json.loads((tmp_path / "r.json").read_text())["summary"]
    assert (summary["num_completed"], summary["max_in_flight"], server.most_open) == (20, 20, 20)


def test_capped(server: FakeServer, tmp_path: Path) -> None:
    server.gate_at = 3
    options = f"--num-prompts 20 --random-output-len 2 --num-warmups 0 --max-concurrency 3 --json {tmp_path / 'r.json'}"
    bench(server, options)
    summary = json.loads((tmp_path / "r.json").read_text())["summary"]
    assert (summary["num_completed"], summary["max_in_flight"], server.most_open) == (20, 3, 3)


def test_several_client_processes(server: FakeServer, tmp_path: Path) -> None:
    """All of what is asked for is open at once, over all processes, and each request is sent once."""
    server.gate_at = 5
    options = "--num-prompts 15 --random-output-len 2 --num-warmups 0 --max-concurrency 5 --client-processes 3"
    bench(server, f"{options} --json {tmp_path / 'r.json'}")
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["summary"]["num_completed"], server.most_open, report["client"]["processes"]) == (15, 5, 3)
    assert len({json.dumps(body["prompt"]) for body in server.bodies}) == 15
    assert len(report["requests"]) == 15


def test_client_processes_share_one_row_of_requests(server: FakeServer, tmp_path: Path) -> None:
    """While one of them waits for its answer, the other sends all that is left."""
    server.held_until = 9
    options = "--num-prompts 9 --random-output-len 2 --num-warmups 0 --max-concurrency 2 --client-processes 2"
    bench(server, f"{options} --timeout 60 --json {tmp_path / 'r.json'}")
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["summary"]["num_completed"], server.most_open) == (9, 2)
    assert len({json.dumps(body["prompt"]) for body in server.bodies}) == 9


@pytest.mark.parametrize("options", ["--request-rate 1000 --max-concurrency 4", "--request-rate 1000", ""])
def test_client_processes_of_an_open_loop(server: FakeServer, tmp_path: Path, options: str) -> None:
    options += f" --num-prompts 9 --random-output-len 2 --num-warmups 0 --client-processes 2 --json {tmp_path / 'r'}"
    bench(server, options)
    assert json.loads((tmp_path / "r").read_text())["summary"]["num_completed"] == 9
    assert len({json.dumps(body["prompt"]) for body in server.bodies}) == 9


def test_chat(server: FakeServer, tmp_path: Path) -> None:
    options = f"--endpoint /v1/chat/completions --num-prompts 3 --random-output-len 4 --json {tmp_path / 'r.json'}"
    bench(server, options, "--model", "tiny-2", "--extra-body", '{"top_k": 1}')
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["summary"]["output_tokens"] == 12
    assert [row["chunks"] for row in report["requests"]] == [4, 4, 4]  # the one with the role is none
    assert server.bodies[1]["messages"][0]["role"] == "user"
    assert (server.bodies[1]["model"], server.bodies[1]["top_k"]) == ("tiny-2", 1)


def test_token_ids_and_a_server_that_does_not_count(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.scripts = {2: "no usage"}
    options = "--token-ids --vocab-size 50 --num-prompts 2 --random-input-len 7 --random-output-len 3"
    bench(server, options, "--json", str(tmp_path / "r"))
    assert [len(body["prompt"]) for body in server.bodies] == [7, 7, 7]
    assert all(10 <= token < 50 for body in server.bodies for token in body["prompt"])
    summary = json.loads((tmp_path / "r").read_text())["summary"]
    assert (summary["output_tokens"], summary["tokens_counted_by"], summary["total_tokens_per_s"]) == (
        6,
        "chunks",
        None,
    )
    assert "the server counts no tokens" in capsys.readouterr().out


def test_nothing_completed_is_exit_code_1(server: FakeServer) -> None:
    server.scripts = {1: "busy", 2: "busy"}
    bench(server, "--num-prompts 2", code=1)


@pytest.mark.parametrize(
    ("options", "script", "said"),
    [
        (["--model", "large", "--api-key", KEY], "", "--model large: the server has tiny, tiny-2"),
        ([], "", "asks for a key (HTTP 401): give one with --api-key"),
        (["--api-key", "x"], "", "does not take this --api-key"),
        (["--api-key", KEY], "busy", "the warm-up request failed: HTTP 429: the queue is full"),
        (["--api-key", KEY, "--goodput", "itl:3"], "", "'itl:3' is not one of ttft:MS, tpot:MS, e2el:MS"),
        (["--request-rate", "0"], "", "neither inf nor a number"),
        (["--max-concurrency", "0"], "", "--max-concurrency 0: must be at least 1"),
        (["--client-processes", "3", "--max-concurrency", "2"], "", "there is work for 2 at most"),
        (["--random-range-ratio", "1"], "", "must be at least 0 and below 1"),
        (["--token-ids", "--endpoint", "/v1/chat/completions"], "", "chat messages are text"),
        (["--extra-body", "[]"], "", "'[]' is not a JSON object"),
        (["--png", "/no/such/folder/x.png"], "", "--png /no/such/folder/x.png: there is no folder"),
    ],
)
def test_errors(
    server: FakeServer, options: list[str], script: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.scripts = {0: script}
    assert main(["bench", "serve", server.url, *options]) == 2
    assert said in capsys.readouterr().err


def test_nobody_there(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "ftp://127.0.0.1"]) == 2
    assert "is not the URL of a server" in capsys.readouterr().err
    assert main(["bench", "serve", "http://127.0.0.1:1"]) == 2
    assert "http://127.0.0.1:1/v1/models cannot be reached" in capsys.readouterr().err


def test_the_address_of_another_machine_stays_out_of_the_report() -> None:
    from ostinato.cli.bench.serve_report import public_command

    words = ["ostinato", "bench", "serve", "https://gpu7.example.org/v1", "--api-key=abc", "--json", "/home/me/r.json"]
    assert public_command(words, "https://gpu7.example.org/v1") == [
        *("ostinato", "bench", "serve", "URL", "--api-key=KEY", "--json", "r.json"),
    ]


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, server: FakeServer, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(Exception, match="pip install matplotlib"):
        serve_plot.require_matplotlib()
    bench(server, f"--num-prompts 1 --random-output-len 2 --png {tmp_path / 'x.png'}", code=2)
    assert server.bodies == []  # found out before anything was sent


class SteppedClock:
    """Moves only when the script says so, and tells when it was read."""

    def __init__(self) -> None:
        self.time = 0.0
        self._read = asyncio.Event()

    def now(self) -> float:
        self._read.set()
        return self.time

    async def sleep_until(self, moment: float) -> None:
        raise AssertionError("nothing here is scheduled")

    async def advance(self, seconds: float, write: Callable[[], Awaitable[None]]) -> None:
        """Whatever `write` sends arrives at the new time."""
        self.time += seconds
        self._read.clear()
        await write()
        await self._read.wait()


def test_times_are_those_of_the_arrivals() -> None:
    """First token after 3 s, then 1, 0.5 (two tokens in one piece) and 2; the end says nothing new."""

    async def scenario() -> Any:
        clock = SteppedClock()

        async def answer(request: Any) -> Any:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)

            def piece(*texts: str, finish: str | None = None) -> Callable[[], Awaitable[None]]:
                chunks = [{"choices": [{"text": text, "finish_reason": finish}]} for text in texts]
                return lambda: response.write("".join(f"data: {json.dumps(c)}\n\n" for c in chunks).encode())

            await clock.advance(3.0, piece("a"))
            await clock.advance(1.0, piece("b"))
            await clock.advance(0.5, piece("c", "d"))
            await clock.advance(2.0, piece("e"))
            await clock.advance(4.0, piece("", finish="length"))
            usage = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}\n\ndata: [DONE]\n\n'
            await clock.advance(0.0, lambda: response.write(usage))
            return response

        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        async with Client(Target(url, "/v1/completions", None, 60.0)) as client:
            outcome = await client.send(Job(0, 0.0, 5, {}), clock)
        await runner.cleanup()
        return outcome

    outcome = asyncio.run(scenario())
    assert outcome.failure is None
    assert outcome.output_times == (3.0, 4.0, 4.5, 4.5, 6.5)
    assert (outcome.ttft_s, outcome.e2el_s, outcome.tpot_s) == (3.0, 6.5, 3.5 / 4)
    assert (outcome.end_s, outcome.prompt_tokens, outcome.output_tokens, outcome.counted) == (10.5, 3, 5, True)
