"""Everything Ostinato raises on purpose.

    OstinatoError
    ├── ConfigError      an option, a model config or a request that cannot be served as asked
    ├── CapacityError    it would be served if there were more room (KV blocks, rows, device memory)
    │   └── QueueFullError   too many requests wait already: it would be served later
    ├── CaptureError     a recording did something that a graph cannot repeat
    ├── StaleGraphError  a recording and the memory it reads no longer belong together
    ├── ConnectorError   the other end of a KV connector is not there, is another one, or does not keep to the protocol
    ├── UnavailableError an engine that serves takes no requests now: it starts, drains, has failed or is closed
    │   └── EngineDeadError  it has failed, and every request that was open with it
    └── WeightError      a checkpoint does not fit the model

A message says what happened, with which values, and what to do about it.
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "CaptureError",
    "ConfigError",
    "ConnectorError",
    "EngineDeadError",
    "OstinatoError",
    "QueueFullError",
    "StaleGraphError",
    "UnavailableError",
    "WeightError",
]


class OstinatoError(Exception):
    """Base class: catching it catches everything that Ostinato raises on purpose."""


class ConfigError(OstinatoError, ValueError):
    """An option, a model configuration or a request cannot be served as asked.

    `field` names the option or parameter that is wrong, where it is one.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class CapacityError(OstinatoError):
    """There is not enough room: KV blocks, rows or device memory."""


class QueueFullError(CapacityError):
    """Too many requests wait already; the same one may be accepted a moment later."""


class CaptureError(OstinatoError):
    """A recording did something that a graph cannot repeat, or was made when none may be made."""


class StaleGraphError(OstinatoError):
    """A recording and the memory it reads no longer belong together; replaying it would read stale data."""


class ConnectorError(OstinatoError):
    """The other end of a KV connector is not there, holds other KV, or does not keep to the protocol."""


class UnavailableError(OstinatoError):
    """The engine takes no requests now: it is starting, draining, closed, or has failed."""


class EngineDeadError(UnavailableError):
    """The engine has failed. Every request that was open ended with this error, and no other will be served."""


class WeightError(OstinatoError):
    """A checkpoint's tensors do not fit the model: missing, unexpected or misshapen, all listed."""
