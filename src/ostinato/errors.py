"""Everything Ostinato raises on purpose.

    OstinatoError
    ├── ConfigError      an option, a model config or a request that cannot be served as asked
    ├── CapacityError    it would be served if there were more room (KV blocks, rows, device memory)
    ├── CaptureError     a recording did something that a graph cannot repeat
    ├── StaleGraphError  a recording and the memory it reads no longer belong together
    └── WeightError      a checkpoint does not fit the model

A message says what happened, with which values, and what to do about it.
"""

from __future__ import annotations

__all__ = ["CapacityError", "CaptureError", "ConfigError", "OstinatoError", "StaleGraphError", "WeightError"]


class OstinatoError(Exception):
    """Base class: catching it catches everything that Ostinato raises on purpose."""


class ConfigError(OstinatoError, ValueError):
    """An option, a model configuration or a request cannot be served as asked."""


class CapacityError(OstinatoError):
    """There is not enough room: KV blocks, rows or device memory."""


class CaptureError(OstinatoError):
    """A recording did something that a graph cannot repeat, or was made when none may be made."""


class StaleGraphError(OstinatoError):
    """A recording and the memory it reads no longer belong together; replaying it would read stale data."""


class WeightError(OstinatoError):
    """A checkpoint's tensors do not fit the model: missing, unexpected or misshapen, all listed."""
