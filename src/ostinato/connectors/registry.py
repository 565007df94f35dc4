"""Connectors by name: those that come with Ostinato, and others that packages announce.

A package announces one in its `pyproject.toml`:

    [project.entry-points."ostinato.kv_connectors"]
    MyConnector = "my_package:make_connector"

where `make_connector(context: ConnectorContext) -> KVConnector`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from ostinato.connectors.protocol import KVConnector, Wait
from ostinato.errors import ConfigError
from ostinato.kv.storage import KVStorage

__all__ = ["ConnectorContext", "make_connector", "names"]

GROUP = "ostinato.kv_connectors"
ROLES = ("kv_both", "kv_producer", "kv_consumer")
_FIELDS = ("kv_connector", "kv_role", "kv_connector_extra_config")


@dataclass(frozen=True, slots=True)
class ConnectorContext:
    """What a connector is made from. `extra` is `kv_connector_extra_config`, `model()` names what KV is
    of, by its contents: connectors that outlive the process must not mix it with that of others."""

    storage: KVStorage
    block_size: int
    model: Callable[[], str]
    role: str
    extra: Mapping[str, Any]

    def wait(self) -> Wait:
        """`extra["wait"]`, an event a layer by default. Raises ConfigError."""
        value = self.extra.get("wait", Wait.EVENTS.value)
        try:
            return Wait(value)
        except ValueError:
            raise _wrong(f"wait={value!r}: must be {', '.join(Wait)}") from None

    def whole(self, name: str, default: int, least: int = 1) -> int:
        """A whole number from `extra`. Raises ConfigError."""
        value = self.extra.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise _wrong(f"{name}={value!r}: must be a whole number of at least {least}")
        return value

    def check_options(self, known: set[str]) -> None:
        """Raises ConfigError for an option that the connector does not have."""
        unknown = sorted(set(self.extra) - known)
        if unknown:
            raise _wrong(f"{', '.join(unknown)}: the options are {', '.join(sorted(known))}")


def _offloading(context: ConnectorContext) -> KVConnector:
    from ostinato.connectors.mover import BlockMover, HostBlocks
    from ostinato.connectors.offloading import OffloadingScheduler

    context.check_options({"cpu_bytes_to_use", "wait"})
    if context.role != "kv_both":
        raise ConfigError(f"kv_role={context.role!r}: OffloadingConnector keeps what it gives, kv_both")
    size = context.storage.block_bytes
    capacity = max(1, context.whole("cpu_bytes_to_use", 4 << 30) // size)
    host = HostBlocks(context.storage, capacity)
    mover = BlockMover(context.storage, host, context.wait())
    return KVConnector(OffloadingScheduler(capacity, context.block_size), mover)


_BUILT_IN: dict[str, Callable[[ConnectorContext], KVConnector]] = {"OffloadingConnector": _offloading}


def names() -> list[str]:
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


def make_connector(
    config: Mapping[str, Any], storage: KVStorage, *, block_size: int, model: Callable[[], str]
) -> KVConnector:
    """From `kv_transfer_config`, as in vLLM: `kv_connector`, `kv_role` and `kv_connector_extra_config`.

    Raises ConfigError for an unknown name or option.
    """
    unknown = sorted(set(config) - set(_FIELDS))
    if unknown:
        raise ConfigError(f"kv_transfer_config: unknown {', '.join(unknown)}; the fields are {', '.join(_FIELDS)}")
    name, role = config.get("kv_connector"), config.get("kv_role", "kv_both")
    if role not in ROLES:
        raise ConfigError(f"kv_transfer_config: kv_role={role!r}: must be {', '.join(ROLES)}")
    make = _BUILT_IN.get(str(name))
    if make is None:
        point = next((point for point in entry_points(group=GROUP) if point.name == name), None)
        if point is None:
            raise ConfigError(f"kv_transfer_config: kv_connector={name!r}: must be one of {', '.join(names())}")
        make = point.load()
    extra = config.get("kv_connector_extra_config") or {}
    if not isinstance(extra, Mapping):
        raise _wrong("must be an object")
    return make(ConnectorContext(storage, block_size, model, role, extra))


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"kv_connector_extra_config: {what}")
