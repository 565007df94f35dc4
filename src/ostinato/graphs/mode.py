"""Which graphs a run records. A mode is only where the step is cut. No torch.

| `CUDAGraphMode`    | uniform (decode) batch | mixed batch |
|--------------------|------------------------|-------------|
| NONE               | NONE                   | NONE        |
| PIECEWISE          | PIECEWISE              | PIECEWISE   |
| FULL               | FULL                   | FULL        |
| FULL_DECODE_ONLY   | FULL                   | NONE        |
| FULL_AND_PIECEWISE | FULL                   | PIECEWISE   |
"""

from __future__ import annotations

import difflib
import enum

from ostinato.errors import ConfigError

__all__ = ["LAYER_CUTS", "CUDAGraphMode", "RuntimeMode"]

LAYER_CUTS = ("attention", "kv_gather")
"""Where a layer may be cut; it has one of the two places. The first is the default."""


class RuntimeMode(enum.StrEnum):
    """How one step is run: called eagerly, or replayed from a recording that is cut or whole."""

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"


class CUDAGraphMode(enum.StrEnum):
    """What a run records: a runtime mode for uniform batches and one for mixed batches."""

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"

    @classmethod
    def parse(cls, text: str | CUDAGraphMode) -> CUDAGraphMode:
        """The mode called `text`, in any case, with `-` or `_`. Raises ConfigError with the nearest name."""
        name = str(text).strip().upper().replace("-", "_")
        if name in cls.__members__:
            return cls[name]
        nearest = difflib.get_close_matches(name, cls.__members__, n=1, cutoff=0.4)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        raise ConfigError(f"no CUDA graph mode is called {text!r}: {hint}Choose one of {', '.join(cls.__members__)}")

    def decode_mode(self) -> RuntimeMode:
        """How a batch whose rows all have the same recorded query length is run."""
        return _RUNTIME_MODES[self][0]

    def mixed_mode(self) -> RuntimeMode:
        """How any other batch is run."""
        return _RUNTIME_MODES[self][1]

    def needs(self, kind: RuntimeMode) -> bool:
        """Whether steps of runtime mode `kind` come up in this mode, for either kind of batch."""
        return kind in _RUNTIME_MODES[self]


_RUNTIME_MODES = {
    CUDAGraphMode.NONE: (RuntimeMode.NONE, RuntimeMode.NONE),
    CUDAGraphMode.PIECEWISE: (RuntimeMode.PIECEWISE, RuntimeMode.PIECEWISE),
    CUDAGraphMode.FULL: (RuntimeMode.FULL, RuntimeMode.FULL),
    CUDAGraphMode.FULL_DECODE_ONLY: (RuntimeMode.FULL, RuntimeMode.NONE),
    CUDAGraphMode.FULL_AND_PIECEWISE: (RuntimeMode.FULL, RuntimeMode.PIECEWISE),
}
