"""Sleep over HTTP: vLLM's three paths, what requests meet meanwhile, and that nothing is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ostinato import LLM, SamplingParams
from ostinato.errors import CapacityError

from ..e2e.models import TinyModel
from .conftest import open_llm
from .running import LONGEST_S, Running, running

BODY = {"prompt": "sleep on it", "max_tokens": 60, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def sleeper(model: TinyModel) -> Iterator[Running]:
    with running(lambda: open_llm(model), enable_sleep_mode=True, api_keys=["k"]) as found:
        yield found


KEY: dict[str, Any] = {"headers": {"Authorization": "Bearer k"}}


def post(server: Running, path: str, body: Any = None) -> Any:
    return server.post(path, body, **KEY)


def is_sleeping(server: Running) -> bool:
    answer: bool = server.get("/is_sleeping", **KEY).json()["is_sleeping"]
    return answer


@pytest.mark.parametrize("level", [1, 2])
def test_asleep_and_awake(sleeper: Running, offline: LLM, level: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    expected = offline.generate("sleep on it", params)[0].outputs[0].text
    assert post(sleeper, "/v1/completions", BODY).json()["choices"][0]["text"] == expected
    assert not is_sleeping(sleeper)
    recordings = sleeper.between_steps(lambda llm: llm.stats().recordings)

    slept = post(sleeper, f"/sleep?level={level}")
    assert (slept.status_code, slept.content) == (200, b"")
    assert is_sleeping(sleeper)
    assert sleeper.get("/graphs/state", **KEY).json()["memory"]["weights"] == 0
    assert sleeper.get("/health").status_code == 200
    for body in (BODY, BODY | {"stream": True}):
        refused = post(sleeper, "/v1/completions", body)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "unavailable")
        assert "no weights: the engine sleeps: wake_up() first" in error["message"]
        assert "no kv_cache" in error["message"]

    assert post(sleeper, "/wake_up?tags=weights").status_code == 200
    assert is_sleeping(sleeper)
    assert "no kv_cache" in post(sleeper, "/v1/completions", BODY).json()["error"]["message"]
    assert post(sleeper, "/wake_up").status_code == 200
    assert post(sleeper, "/wake_up?tags=weights&tags=kv_cache").status_code == 200
    assert not is_sleeping(sleeper)
    assert post(sleeper, "/v1/completions", BODY).json()["choices"][0]["text"] == expected
    assert sleeper.between_steps(lambda llm: llm.stats().recordings) == recordings


def test_an_open_request_waits_and_goes_on(sleeper: Running) -> None:
    expected = post(sleeper, "/v1/completions", BODY).json()["choices"][0]["text"]
    answers: list[Any] = []
    with sleeper.slow_steps(0.02):
        asking = threading.Thread(target=lambda: answers.append(post(sleeper, "/v1/completions", BODY)))
        asking.start()
        deadline = time.monotonic() + LONGEST_S
        while not sleeper.engine.num_open:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert post(sleeper, "/sleep").status_code == 200
        assert sleeper.engine.num_open == 1
        steps = sleeper.between_steps(lambda llm: sum(step.count for step in llm.stats().steps))
        time.sleep(0.2)
        assert sleeper.between_steps(lambda llm: sum(step.count for step in llm.stats().steps)) == steps
        assert not answers
        assert post(sleeper, "/wake_up").status_code == 200
        asking.join(LONGEST_S)
    (answer,) = answers
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == expected
    sleeper.wait_idle()


@pytest.mark.parametrize(
    ("path", "param", "says"),
    [
        ("/sleep?level=3", "level", "level=3: 1 keeps the weights in host memory"),
        ("/sleep?level=deep", "level", "level"),
        ("/wake_up?tags=weight", "tags", "tag 'weight': must be 'weights' or 'kv_cache'"),
    ],
)
def test_what_is_refused(sleeper: Running, path: str, param: str, says: str) -> None:
    refused = post(sleeper, path)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert says in refused.json()["error"]["message"]
    assert not is_sleeping(sleeper)


def test_no_room_to_wake_up(sleeper: Running) -> None:
    """503 and still asleep; with room again, it wakes."""

    def fill_device(llm: LLM) -> Any:
        pool = llm._require().pool
        original = pool.take_back

        def take_back() -> None:
            raise CapacityError("cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY: 3 MiB of 80000 MiB are free")

        pool.take_back = take_back  # type: ignore[method-assign]
        return original

    assert post(sleeper, "/sleep").status_code == 200
    original = sleeper.between_steps(fill_device)
    try:
        refused = post(sleeper, "/wake_up")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "out_of_memory"
        assert "3 MiB of 80000 MiB are free" in refused.json()["error"]["message"]
        assert is_sleeping(sleeper)
    finally:
        sleeper.between_steps(lambda llm: setattr(llm._require().pool, "take_back", original))
    assert post(sleeper, "/wake_up").status_code == 200
    assert post(sleeper, "/v1/completions", BODY).status_code == 200


def test_they_need_the_key(sleeper: Running) -> None:
    assert sleeper.post("/sleep", None).status_code == 401
    assert sleeper.get("/is_sleeping").status_code == 401


def test_only_where_asked_for(server: Running) -> None:
    for answer in (server.post("/sleep", None), server.post("/wake_up", None), server.get("/is_sleeping")):
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "not_found"
    assert "/sleep" not in server.get("/openapi.json").json()["paths"]


def test_they_are_described(sleeper: Running) -> None:
    paths = sleeper.get("/openapi.json").json()["paths"]
    assert {"/sleep", "/wake_up", "/is_sleeping"} <= paths.keys()
    names = [parameter["name"] for parameter in paths["/wake_up"]["post"]["parameters"]]
    assert names == ["tags"]
