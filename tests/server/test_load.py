"""Many at once, some of whom leave: nobody else notices, nothing is left behind."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from ostinato import LLM, SamplingParams

from ..e2e.models import TinyModel
from .conftest import open_llm
from .metrics_text import Samples
from .running import LONGEST_S, SMALL, Running, running

V = 160
NUM_STREAMS = 60


def requests(count: int, seed: int) -> list[dict[str, Any]]:
    """Prompts with shared beginnings, greedy and drawn, short and long."""
    generator = random.Random(seed)
    stems = [[generator.randrange(1, V) for _ in range(40)] for _ in range(3)]
    made = []
    for index in range(count):
        stem = generator.choice(stems)[: generator.choice([0, 16, 40])]
        prompt = stem + [generator.randrange(1, V) for _ in range(generator.randrange(1, 30))]
        sampling = {"temperature": 0.0} if index % 2 else {"temperature": 0.8, "top_p": 0.9, "seed": index}
        made.append({"prompt": prompt, "max_tokens": generator.randrange(5, 60), "ignore_eos": True, **sampling})
    return made


def offline_texts(llm: LLM, bodies: list[dict[str, Any]]) -> list[str]:
    params = [SamplingParams(**{k: v for k, v in body.items() if k != "prompt"}) for body in bodies]
    return [output.outputs[0].text for output in llm.generate([body["prompt"] for body in bodies], params)]


async def stream_text(client: openai.AsyncOpenAI, body: dict[str, Any], leave_after: int | None) -> str:
    """All of the text, or that of the first `leave_after` chunks."""
    sampling = {key: body[key] for key in ("max_tokens", "temperature", "top_p", "seed") if key in body}
    stream = await client.completions.create(
        model="tiny", prompt=body["prompt"], stream=True, extra_body={"ignore_eos": True}, **sampling
    )
    text = ""
    async with stream:
        number = 0
        async for chunk in stream:
            text += chunk.choices[0].text
            number += 1
            if number == leave_after:
                break
    return text


@dataclass(frozen=True)
class Crowd:
    """Requests sent at once, some of which are left: a third in the middle, a tenth before they have begun."""

    bodies: list[dict[str, Any]]
    expected: list[str]
    leaving: dict[int, int]  # after so many chunks
    impatient: set[int]

    async def drive(self, url: str, generator: random.Random) -> list[str | BaseException]:
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key="x",
            max_retries=0,
            timeout=LONGEST_S,
            http_client=httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=LONGEST_S),
        ) as client:

            async def one(index: int) -> str:
                await asyncio.sleep(generator.random() * 0.3)
                call = stream_text(client, self.bodies[index], self.leaving.get(index))
                if index in self.impatient:
                    return await asyncio.wait_for(call, 0.05)
                return await call

            return await asyncio.gather(*map(one, range(len(self.bodies))), return_exceptions=True)

    def assert_right(self, texts: list[str | BaseException]) -> None:
        """Of those who stayed all, of those who left the beginning: what an offline run says."""
        for index, text in enumerate(texts):
            if index in self.impatient:
                assert isinstance(text, TimeoutError) or text == self.expected[index]
            elif index in self.leaving:
                assert isinstance(text, str)
                assert self.expected[index].startswith(text)
            else:
                assert text == self.expected[index], index

    @property
    def num_patient(self) -> int:
        return len(self.bodies) - len(self.leaving) - len(self.impatient)


def crowd(offline: LLM, count: int, seed: int) -> Crowd:
    bodies, generator = requests(count, seed), random.Random(seed + 1)
    leaving = {index: generator.randrange(1, 5) for index in range(0, count, 3)}
    return Crowd(bodies, offline_texts(offline, bodies), leaving, set(range(1, count, 10)))


def test_streams_with_random_disconnects(model: TinyModel, offline: LLM) -> None:
    many = crowd(offline, NUM_STREAMS, seed=1)
    # fewer blocks than the rows would like, so that requests are preempted too
    with running(lambda: open_llm(model, num_gpu_blocks_override=24)) as server:
        num_tasks = server.num_tasks()
        with server.slow_steps(0.005):  # nobody's answer is whole before he leaves
            texts = asyncio.run(many.drive(server.url, random.Random(2)))
        server.wait_idle()
        samples = Samples.parse(server.get("/metrics").text)
        server.assert_nothing_leaked(num_tasks)
    many.assert_right(texts)
    ended = samples.by_label("request_success_total", "finished_reason")
    assert sum(ended.values()) <= NUM_STREAMS
    assert ended["length"] >= many.num_patient
    assert ended["abort"] > 0
    assert ended["error"] == 0


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_two_hundred_streams_for_five_minutes(model: TinyModel, offline: LLM) -> None:
    """Crowd after crowd until the time is over: nobody notices who left, and nothing is left behind."""
    crowds = [crowd(offline, 200, seed) for seed in range(10, 14)]
    generator, rounds = random.Random(3), 0
    with running(lambda: open_llm(model, num_gpu_blocks_override=24)) as server:
        num_tasks, began = server.num_tasks(), time.monotonic()
        while time.monotonic() - began < 300:
            many = crowds[rounds % len(crowds)]
            many.assert_right(asyncio.run(many.drive(server.url, generator)))
            rounds += 1
            server.wait_idle()
            server.assert_nothing_leaked(num_tasks)
        ended = Samples.parse(server.get("/metrics").text).by_label("request_success_total", "finished_reason")
    print(f"{rounds} crowds of 200 in {time.monotonic() - began:.0f} s: {ended}")
    assert ended["length"] >= rounds * many.num_patient and ended["abort"] > 0 and ended["error"] == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_frees_the_request_at_once(server: Running, stream: bool) -> None:
    """Long before it would have ended."""
    server.wait_idle()
    before = Samples.parse(server.get("/metrics").text)
    body = {"prompt": "left alone", "max_tokens": 180, "ignore_eos": True, "stream": stream}

    async def leave() -> None:
        async with httpx.AsyncClient() as client:
            async with asyncio.timeout(LONGEST_S):
                call = asyncio.create_task(_read(client, f"{server.url}/v1/completions", body))
                while server.engine.num_open == 0:
                    await asyncio.sleep(0.002)
                await asyncio.sleep(0.2)
                call.cancel()
                await asyncio.wait([call])

    with server.slow_steps(0.1):
        asyncio.run(leave())
        server.wait_idle(10)
    after = Samples.parse(server.get("/metrics").text)
    ended = {
        reason: after.by_label("request_success_total", "finished_reason")[reason]
        - before.by_label("request_success_total", "finished_reason")[reason]
        for reason in ("abort", "length", "stop")
    }
    assert ended == {"abort": 1, "length": 0, "stop": 0}
    assert after.total("generation_tokens_total") - before.total("generation_tokens_total") < 180
    stats = server.engine.info.stats
    assert server.between_steps(lambda llm: llm.engine.scheduler.kv.num_free) == stats.num_blocks - 1


async def _read(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> None:
    async with client.stream("POST", url, json=body, timeout=LONGEST_S) as response:
        async for _ in response.aiter_lines():
            pass


def test_a_slow_reader_holds_nobody_up(server: Running, offline: LLM) -> None:
    """One takes its first bytes and no more; the others are served meanwhile, and it gets all of its text later."""
    long = {"prompt": "slow", "max_tokens": 150, "temperature": 0.0, "ignore_eos": True}
    others = requests(8, seed=7)
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=long | {"stream": True}, timeout=LONGEST_S) as response:
        lines = response.iter_lines()
        first = next(lines)
        texts = [server.post("/v1/completions", body).json()["choices"][0]["text"] for body in others]
        rest = [line for line in lines if line]
    assert texts == offline_texts(offline, others)
    assert first.startswith("data: ")
    assert rest[-1] == "data: [DONE]"
    server.wait_idle()


def test_the_settings_leave_room_to_queue() -> None:
    """What the tests above rely on: more streams than rows."""
    assert SMALL["max_num_seqs"] < NUM_STREAMS
