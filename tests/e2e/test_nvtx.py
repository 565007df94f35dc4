"""Ranges by layer around what is launched, seen by a sink that stands in for `torch.cuda.nvtx`."""

from __future__ import annotations

import pytest
import torch

from ostinato import LLM, ConfigError
from ostinato.engine import parts
from ostinato.models.ranges import LayerRanges

from .conftest import TinyFactory
from .driving import greedy
from .models import TinyModel

PROMPT = [5, 6, 7, 8, 9]


class Sink:
    """Keeps every range as its path from the outermost one."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.seen: list[str] = []

    def range_push(self, msg: str) -> None:
        self.open.append(msg)
        self.seen.append(" / ".join(self.open))

    def range_pop(self) -> None:
        self.open.pop()

    def take(self) -> list[str]:
        assert not self.open, "a range was not popped"
        seen, self.seen = self.seen, []
        return seen


@pytest.fixture(scope="module")
def model(tiny_model: TinyFactory) -> TinyModel:
    return tiny_model("Llama")


def open_llm(model: TinyModel, mode: str = "FULL_AND_PIECEWISE") -> LLM:
    return LLM(
        str(model.path),
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        cudagraph_capture_sizes=[2, 8],
        cudagraph_mode=mode,
    )


def traced(llm: LLM) -> Sink:
    sink = Sink()
    llm.engine.runner.model.ranges = LayerRanges(sink)
    return sink


def step_ranges(name: str) -> list[str]:
    layers = [[f"{name} / layer {n}", f"{name} / layer {n} / layer {n} attention"] for n in range(2)]
    return [name, *layers[0], *layers[1], f"{name} / head"]


def test_an_eager_step_has_its_layers(model: TinyModel) -> None:
    with open_llm(model, "NONE") as llm:
        sink = traced(llm)
        assert llm.generate(PROMPT, greedy(2))[0].outputs[0].token_ids == model.greedy(PROMPT, 2)
        assert sink.take() == step_ranges("NONE decode:1x5") + step_ranges("NONE decode:1")


def test_a_recording_has_its_layers_and_a_replay_what_runs_between_graphs(model: TinyModel) -> None:
    with open_llm(model) as llm:
        runner = llm.engine.runner
        runner.store.clear()
        sink = traced(llm)
        runner.record()
        whole, cut = step_ranges("FULL decode:2"), step_ranges("PIECEWISE mixed:8")
        between = [path for path in cut if path.endswith(("attention", "head"))]
        seen = sink.take()
        assert [path for path in seen if path.startswith("FULL")] == whole
        # what is cut out does not run while recording
        assert [path for path in seen if "mixed:8" in path] == [path for path in cut if path not in between]
        assert llm.generate([PROMPT] * 2, greedy(3))[0].outputs[0].token_ids == model.greedy(PROMPT, 3)
        replayed = [path for path in sink.take() if not path.startswith("NONE")]
        names = [path.rsplit(" / ")[-1] for path in between]
        assert replayed == names * (len(replayed) // len(names))
        assert replayed


def test_ranges_are_popped_when_a_step_fails(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm(model, "NONE") as llm:
        sink = traced(llm)
        plain = llm.engine.runner.model._plain

        def fail(*args: object) -> torch.Tensor:
            raise RuntimeError("put in on purpose")

        monkeypatch.setattr(type(plain), "mlp", fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            llm.generate(PROMPT, greedy(2))
        monkeypatch.undo()
        assert sink.take()[-1].endswith("layer 0 attention")
        llm.generate(PROMPT, greedy(2))
        assert sink.take()[-1].endswith("/ head")


def test_off_by_default_and_refused_where_there_is_no_cuda(model: TinyModel) -> None:
    with open_llm(model, "NONE") as llm:
        assert llm.engine.runner.model.ranges is None
        config = llm._require().config
    assert parts.make_ranges(config, torch.device("cuda")) is None
    with pytest.raises(ConfigError, match=r"enable_layerwise_nvtx_tracing names CUDA work for Nsight.* run on cpu"):
        LLM(str(model.path), device="cpu", enable_layerwise_nvtx_tracing=True)
