from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from ostinato.graphs.backends import GraphBackend
from ostinato.graphs.recorder import Recorder
from ostinato.graphs.statics import Statics

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@dataclass
class Bench:
    """A recorder over one backend, and tensors that are registered as they are made."""

    backend: GraphBackend
    statics: Statics = field(default_factory=Statics)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = self.backend.device
        self.recorder = Recorder(self.backend, self.statics)

    def static(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.tensors[name] = tensor.to(self.device)
        self.statics.add(name, lambda: self.tensors[name])
        return self.tensors[name]

    def randn(self, name: str, *size: int) -> torch.Tensor:
        return self.static(name, torch.randn(*size, generator=torch.Generator().manual_seed(len(self.tensors))))

    def zeros(self, name: str, *size: int) -> torch.Tensor:
        return self.static(name, torch.zeros(*size))

    def warm(self, run: Callable[[], None]) -> None:
        """Runs eagerly where the backend needs it before recording, and undoes what that wrote."""
        if self.backend.needs_warm_up:
            before = {name: tensor.clone() for name, tensor in self.tensors.items()}
            with self.backend.warm_up_context(), torch.no_grad():
                run()
            self.backend.synchronize()
            for name, tensor in before.items():
                self.tensors[name].copy_(tensor)


def quiet(result: object) -> None:
    """Makes a one-line step of an expression."""


def _make(name: str) -> GraphBackend:
    if name == "tape":
        from ostinato.graphs.tape import TapeBackend

        return TapeBackend()
    from ostinato.graphs.cuda import CudaBackend

    return CudaBackend()


@pytest.fixture(params=["tape", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(_make(request.param))
