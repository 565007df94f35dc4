"""`DiskConnector` on the tape backend: tokens as without it, whatever happens to files, process and threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM, ConfigError
from ostinato.connectors.disk import DiskBlocks
from ostinato.connectors.protocol import Wait
from ostinato.connectors.store import Deliver

from .conftest import TinyFactory
from .connecting import disk, open_llm, stats_of, tokens_of, until
from .driving import ALWAYS, greedy
from .models import TinyModel, prompts_of

WAITS = [wait.value for wait in Wait]
LONG = prompts_of((70, 90, 80, 75), 160, seed=90)


@pytest.fixture(scope="module")
def model(tiny_model: TinyFactory) -> TinyModel:
    return tiny_model("Qwen3", num_hidden_layers=3)


@pytest.fixture(scope="module")
def expected(model: TinyModel) -> list[list[int]]:
    return [model.greedy(prompt, 5) for prompt in LONG]


@pytest.fixture(scope="module")
def full(model: TinyModel, expected: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the blocks of LONG, which an engine has left. Only read."""
    folder = tmp_path_factory.mktemp("blocks")
    with open_llm(model.path, disk(folder)) as llm:
        assert [tokens_of(llm, prompt) for prompt in LONG] == expected
        until(lambda: stats_of(llm).pending_saves == 0)
        assert stats_of(llm).saved_blocks == 4 + 5 + 5 + 4
        assert stats_of(llm).failed_loads == stats_of(llm).failed_saves == 0
    assert len(files_in(folder)) == 18
    return folder


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_a_new_engine_finds_the_blocks(
    model: TinyModel, expected: list[list[int]], full: Path, mode: str, wait: str
) -> None:
    with open_llm(model.path, disk(full, "kv_consumer", wait=wait), cudagraph_mode=mode, check=ALWAYS) as llm:
        outputs = llm.generate(LONG, greedy(5))
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert [output.num_cached_tokens for output in outputs] == [64, 80, 64, 64]
        stats = stats_of(llm)
        assert stats.hit_tokens == 64 + 80 + 64 + 64
        assert stats.deferred_requests == 4
        assert stats.saved_blocks == 0
        llm.engine.scheduler.check_integrity()


def test_a_producer_does_not_read(model: TinyModel, expected: list[list[int]], full: Path) -> None:
    with open_llm(model.path, disk(full, "kv_producer")) as llm:
        assert tokens_of(llm, LONG[0]) == expected[0]
        assert stats_of(llm).hit_tokens == stats_of(llm).deferred_requests == 0


def test_another_model_finds_nothing(tiny_model: TinyFactory, full: Path) -> None:
    other = tiny_model("Qwen3", num_hidden_layers=3, seed=1)
    with open_llm(other.path, disk(full, "kv_consumer")) as llm:
        assert tokens_of(llm, LONG[0]) == other.greedy(LONG[0], 5)
        assert stats_of(llm).hit_tokens == 0


def test_other_weights_have_blocks_of_their_own(
    model: TinyModel, tiny_model: TinyFactory, expected: list[list[int]], tmp_path: Path
) -> None:
    from ostinato.weights.checkpoint import open_checkpoint

    other = tiny_model("Qwen3", num_hidden_layers=3, seed=1)

    def saved(llm: LLM) -> int:
        until(lambda: stats_of(llm).pending_saves == 0)
        return stats_of(llm).saved_blocks

    with open_llm(model.path, disk(tmp_path)) as llm:
        assert tokens_of(llm, LONG[0]) == expected[0]
        assert saved(llm) == 4
        llm.update_weights(open_checkpoint(str(other.path)).tensors())
        assert tokens_of(llm, LONG[0]) == other.greedy(LONG[0], 5)
        assert stats_of(llm).hit_tokens == 0, "KV of the weights before"
        assert saved(llm) == 8
        llm.reload_weights()
        assert tokens_of(llm, LONG[0]) == expected[0]
        assert stats_of(llm).hit_tokens == 64, "that of the checkpoint, as at the start"
        llm.update_weights(open_checkpoint(str(other.path)).tensors())
        assert tokens_of(llm, LONG[0]) == other.greedy(LONG[0], 5)
        assert stats_of(llm).hit_tokens == 128
        assert saved(llm) == 8
        name, tensor = next(pair for pair in open_checkpoint(str(other.path)).tensors() if "layers.0" in pair[0])
        changed = tensor.clone()
        changed.view(-1)[1] += 0.5
        llm.update_weights([(name, changed)])
        tokens_of(llm, LONG[0])
        assert stats_of(llm).hit_tokens == 128, "one value has changed"
    assert len(files_in(tmp_path)) == 12
    with open_llm(model.path, disk(tmp_path, "kv_consumer")) as llm:
        llm.update_weights(open_checkpoint(str(other.path)).tensors())
        assert tokens_of(llm, LONG[0]) == other.greedy(LONG[0], 5)
        assert stats_of(llm).hit_tokens == 64


def test_weights_that_could_not_all_be_read_have_blocks_of_their_own(
    model: TinyModel, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ostinato.engine import control

    def fail(*_: object) -> None:
        llm._built.weights.weights.norm.mul_(2)  # type: ignore[union-attr]
        raise OSError("put in on purpose")

    with open_llm(model.path, disk(tmp_path)) as llm:
        assert tokens_of(llm, LONG[0]) == expected[0]
        until(lambda: stats_of(llm).pending_saves == 0)
        with monkeypatch.context() as patch, pytest.raises(OSError, match="put in on purpose"):
            patch.setattr(control, "load_weights", fail)
            llm.reload_weights()
        tokens_of(llm, LONG[0])
        assert stats_of(llm).hit_tokens == 0
        llm.reload_weights()
        assert tokens_of(llm, LONG[0]) == expected[0]
        assert stats_of(llm).hit_tokens == 64


def test_what_waits_to_be_saved_is_saved_before_sleep(
    model: TinyModel, expected: list[list[int]], tmp_path: Path
) -> None:
    with open_llm(model.path, disk(tmp_path)) as llm:
        state = llm.engine.add_request("r", LONG[1], greedy(5))
        while state.num_tokens < 1:
            llm.engine.step()
        llm.sleep()
        llm.wake_up()
        while llm.engine.has_unfinished:
            llm.engine.step()
        assert state.request.output_token_ids == expected[1]
    with open_llm(model.path, disk(tmp_path, "kv_consumer")) as llm:
        assert tokens_of(llm, LONG[1]) == expected[1]
        assert stats_of(llm).hit_tokens == 80


def test_the_folder_stays_within_its_size(model: TinyModel, expected: list[list[int]], tmp_path: Path) -> None:
    with open_llm(model.path, disk(tmp_path, max_bytes=150_000)) as llm:
        for _ in range(2):
            assert [tokens_of(llm, prompt) for prompt in LONG] == expected
        until(lambda: stats_of(llm).pending_saves == 0)
        assert stats_of(llm).saved_blocks > len(files_in(tmp_path))
    assert 0 < sum(path.stat().st_size for path in files_in(tmp_path)) <= 150_000


def test_damage_is_a_miss(model: TinyModel, expected: list[list[int]], full: Path, tmp_path: Path) -> None:
    """A byte changed, cut off or added at random, or another block's file under this name: never a wrong token."""
    chance = random.Random(1)
    whole = {path.relative_to(full): path.read_bytes() for path in files_in(full)}
    hits = []
    for round_ in range(8):
        folder = tmp_path / str(round_)
        for name, data in whole.items():
            changed = bytearray(data)
            match chance.randrange(6):
                case 0:
                    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
                case 1:
                    del changed[chance.randrange(len(changed)) :]
                case 2:
                    changed = bytearray(chance.choice(list(whole.values())))
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(changed)
        with open_llm(model.path, disk(folder)) as llm:
            assert [tokens_of(llm, prompt) for prompt in LONG] == expected
            hits.append(stats_of(llm).hit_tokens)
    assert 0 < sum(hits) < 8 * (64 + 80 + 64 + 64)


class Held:
    """Reads that wait until they are let go, and may then fail after some blocks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.begun, self.fail_after = threading.Event(), threading.Event(), 1000
        read = DiskBlocks.read

        def held(store: DiskBlocks, digests: Sequence[bytes], deliver: Deliver) -> None:
            self.begun.set()
            self.go.wait(60)
            read(store, digests[: self.fail_after], deliver)
            if len(digests) > self.fail_after:
                raise OSError("put in on purpose")

        monkeypatch.setattr(DiskBlocks, "read", held)


def step_until_deferred(llm: LLM) -> None:
    for _ in range(100):
        llm.engine.step()
        if llm.engine.scheduler.num_deferred:
            return
    raise AssertionError("nothing waits")


def test_others_go_on_while_one_waits(
    model: TinyModel, expected: list[list[int]], full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    short = prompts_of((9, 12), 160, seed=91)
    with open_llm(model.path, disk(full, "kv_consumer")) as llm:
        waits = llm.engine.add_request("waits", LONG[0], greedy(5))
        step_until_deferred(llm)
        others = [llm.engine.add_request(f"o{i}", prompt, greedy(8)) for i, prompt in enumerate(short)]
        while any(other.request.finish_reason is None for other in others):
            llm.engine.step()
        assert [other.request.output_token_ids for other in others] == [model.greedy(p, 8) for p in short]
        assert waits.num_tokens == 0
        assert llm.engine.scheduler.num_deferred == 1
        assert stats_of(llm).deferred_requests == 1
        held.go.set()
        while llm.engine.has_unfinished:
            llm.engine.step()
        assert waits.request.output_token_ids == expected[0]
        assert waits.request.num_cached_tokens == 64


def test_one_reads_for_all_that_wait_for_the_same(
    model: TinyModel, expected: list[list[int]], full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    with open_llm(model.path, disk(full, "kv_consumer")) as llm:
        states = [llm.engine.add_request(f"r{i}", LONG[0], greedy(5)) for i in range(3)]
        step_until_deferred(llm)
        assert llm.engine.scheduler.num_deferred == 3
        held.go.set()
        while llm.engine.has_unfinished:
            llm.engine.step()
        assert [state.request.output_token_ids for state in states] == [expected[0]] * 3
        assert stats_of(llm).deferred_requests == 3


@pytest.mark.parametrize("fail_after", [0, 2])
def test_a_read_that_fails(
    model: TinyModel, expected: list[list[int]], full: Path, monkeypatch: pytest.MonkeyPatch, fail_after: int
) -> None:
    held = Held(monkeypatch)
    held.fail_after = fail_after
    held.go.set()
    with open_llm(model.path, disk(full, "kv_consumer")) as llm:
        output = llm.generate(LONG[0], greedy(5))[0]
        assert list(output.outputs[0].token_ids) == expected[0]
        assert output.num_cached_tokens == 16 * fail_after
        assert stats_of(llm).failed_loads == 1


def test_a_read_that_hangs(
    model: TinyModel, expected: list[list[int]], full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    with open_llm(model.path, disk(full, "kv_consumer", load_timeout_s=0.2)) as llm:
        assert tokens_of(llm, LONG[0]) == expected[0]
        assert stats_of(llm).failed_loads == 1
        assert stats_of(llm).hit_tokens == 0
        held.go.set()


@pytest.mark.parametrize("how", ["abort", "close"])
def test_it_ends_while_it_waits(
    model: TinyModel, expected: list[list[int]], full: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    held = Held(monkeypatch)
    llm = open_llm(model.path, disk(full, "kv_consumer"))
    llm.engine.add_request("r", LONG[0], greedy(5))
    step_until_deferred(llm)
    assert held.begun.wait(60)
    if how == "abort":
        llm.engine.abort("r")
        assert not llm.engine.has_unfinished
    held.go.set()
    if how == "abort":
        assert tokens_of(llm, LONG[1]) == expected[1]
        scheduler: Any = llm._built.connector.scheduler  # type: ignore[union-attr]
        until(lambda: not +scheduler._index._holds)
    llm.close()


@pytest.mark.parametrize("where", ["before the connector", "in the connector"])
def test_a_step_that_was_not_launched_keeps_no_memory_and_saves_nothing_wrong(
    model: TinyModel, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    with open_llm(model.path, disk(tmp_path)) as llm:
        scheduler: Any = llm._built.connector.scheduler  # type: ignore[union-attr]
        worker: Any = llm._built.connector.worker  # type: ignore[union-attr]

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("put in on purpose")

        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="put in on purpose"):
            state = llm.engine.add_request("r", LONG[1], greedy(20))
            while state.num_tokens < 1:  # the step after a whole block was computed has blocks to save
                if scheduler._saves:
                    break
                llm.engine.step()
            patch.setattr(*((llm.engine.runner, "_stage") if where.startswith("before") else (worker, "_copies")), fail)
            llm.engine.step()
        assert [tokens_of(llm, prompt) for prompt in LONG] == expected
        until(lambda: stats_of(llm).pending_saves == 0)
        until(lambda: stats_of(llm).held_blocks >= 0 and not +scheduler._index._holds)
        assert stats_of(llm).failed_saves > 0
    with open_llm(model.path, disk(tmp_path, "kv_consumer")) as llm:
        assert [tokens_of(llm, prompt) for prompt in LONG] == expected
        assert stats_of(llm).hit_tokens > 0


@pytest.mark.parametrize(("wait", "max_in_flight"), [("events", 1), ("hooks", 2), ("step", 2)])
def test_many_requests_over_little_memory(model: TinyModel, tmp_path: Path, wait: str, max_in_flight: int) -> None:
    """Shared beginnings, preemption, aborts, a folder and a host memory that forget: every token is as without."""
    chance = random.Random(f"{wait} {max_in_flight}")
    heads = prompts_of((48, 32, 64, 80, 48, 64), 160, seed=83)
    tails = prompts_of([chance.randint(1, 20) for _ in range(40)], 160, seed=84)
    prompts = [[*heads[chance.randrange(6)], *tail] for tail in tails]
    transfer = disk(tmp_path, max_bytes=400_000, cpu_bytes_to_use=200_000, wait=wait)
    with open_llm(model.path, transfer, max_in_flight=max_in_flight) as llm:
        states: list[Any] = []
        while len(states) < len(prompts) or llm.engine.has_unfinished:
            while len(states) < len(prompts) and llm.engine.scheduler.num_waiting < 3:
                number = len(states)
                states.append(llm.engine.add_request(f"r{number}", prompts[number], greedy(chance.randint(1, 20))))
                if chance.random() < 0.1:
                    llm.engine.abort(f"r{chance.randrange(len(states))}")
            llm.engine.step()
        llm.engine.scheduler.check_integrity()
        assert stats_of(llm).saved_blocks > 10
        assert stats_of(llm).loaded_blocks > 5
    for prompt, state in zip(prompts, states, strict=True):
        tokens = state.request.output_token_ids
        assert tokens == model.greedy(prompt, len(tokens))


@pytest.mark.parametrize(
    ("transfer", "says"),
    [
        ({"kv_connector": "DiskConnector"}, "path=None: must be the folder"),
        (disk(Path("x"), max_bytes=0), "max_bytes=0: must be a whole number"),
        (disk(Path("x"), fsync=1), "fsync=1: must be true or false"),
        (disk(Path("x"), load_timeout_s=0), "load_timeout_s=0: must be more than 0 s"),
        (disk(Path("x"), bytes=1), "bytes: the options are"),
        ({"kv_connector": "TcpConnector"}, "two ends, kv_producer and kv_consumer"),
        ({"kv_connector": "TcpConnector", "kv_role": "kv_consumer", "kv_port": 0}, "kv_port=0: must be a port"),
        ({"kv_connector": "TcpConnector", "kv_role": "kv_consumer", "kv_ip": ""}, "kv_ip=''"),
    ],
)
def test_what_cannot_be(
    model: TinyModel, transfer: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=says):
        open_llm(model.path, transfer)
