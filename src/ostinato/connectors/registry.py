"""Connectors by name: those that come with Ostinato, and others that packages announce.

A package announces one in its `pyproject.toml`:

    [project.entry-points."ostinato.kv_connectors"]
    MyConnector = "my_package:make_connector"

where `make_connector(context: ConnectorContext) -> KVConnector`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from ostinato.connectors.block_file import namespace_of
from ostinato.connectors.disk import make_disk_connector
from ostinato.connectors.protocol import KVConnector, Wait
from ostinato.connectors.remote import make_tcp_connector
from ostinato.errors import ConfigError
from ostinato.kv.storage import KVStorage

__all__ = ["ConnectorContext", "make_connector", "names"]

GROUP = "ostinato.kv_connectors"
ROLES = ("kv_both", "kv_producer", "kv_consumer")
DEFAULT_PORT = 14579
"""vLLM's."""
_LOADS: dict[str, bool | None] = {"auto": None, "sync": False, "async": True}
_FIELDS = ("kv_connector", "kv_role", "kv_ip", "kv_port", "kv_connector_extra_config")


@dataclass(frozen=True, slots=True)
class ConnectorContext:
    """What a connector is made from. `extra` is `kv_connector_extra_config`; `model()` names what KV is of when the
    engine starts, by its contents (later: `ContentsKVConnectorScheduler`). `ip` and `port` are those of the end that
    listens, where there is one."""

    storage: KVStorage
    block_size: int
    model: Callable[[], str]
    role: str
    extra: Mapping[str, Any]
    ip: str = "127.0.0.1"
    port: int = DEFAULT_PORT

    @property
    def block_bytes(self) -> int:
        """Of one block, all layers, as stores see it."""
        return self.storage.block_bytes

    def namespace(self) -> str:
        """A short name for all that must be equal for blocks to be exchanged: the model's contents and how a block is
        laid out. Connectors that outlive the process must not mix one with another. Reads some of the weights."""
        pool = self.storage.pool
        return namespace_of(
            model=self.model(),
            dtype=str(pool.dtype),
            shape=list(pool.shape[1:]),
            block_bytes=self.block_bytes,
            block_size=self.block_size,
        )

    def wait(self) -> Wait:
        """`extra["wait"]`, an event a layer by default. Raises ConfigError."""
        value = self.extra.get("wait", Wait.EVENTS.value)
        try:
            return Wait(value)
        except ValueError:
            raise _wrong(f"wait={value!r}: must be {', '.join(Wait)}") from None

    def load_kv_async(self) -> bool | None:
        """`extra["load"]`: "sync" is False, "async" True, and "auto", the default, None: as it suits what else runs
        (`KVConnectorScheduler.get_num_new_matched_tokens`). Raises ConfigError."""
        value = self.extra.get("load", "auto")
        if not isinstance(value, str) or value not in _LOADS:
            raise _wrong(f"load={value!r}: must be {', '.join(_LOADS)}")
        return _LOADS[value]

    def whole(self, name: str, default: int, least: int = 1) -> int:
        """A whole number from `extra`. Raises ConfigError."""
        value = self.extra.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise _wrong(f"{name}={value!r}: must be a whole number of at least {least}")
        return value

    def seconds(self, name: str, default: float) -> float:
        """A time from `extra`. Raises ConfigError."""
        value = self.extra.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise _wrong(f"{name}={value!r}: must be more than 0 s")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or False from `extra`. Raises ConfigError."""
        value = self.extra.get(name, default)
        if not isinstance(value, bool):
            raise _wrong(f"{name}={value!r}: must be true or false")
        return value

    def check_options(self, known: set[str]) -> None:
        """Raises ConfigError for an option that the connector does not have."""
        unknown = sorted(set(self.extra) - known)
        if unknown:
            raise _wrong(f"{', '.join(unknown)}: the options are {', '.join(sorted(known))}")


def _offloading(context: ConnectorContext) -> KVConnector:
    from ostinato.connectors.mover import BlockMover, HostBlocks
    from ostinato.connectors.offloading import OffloadingScheduler

    context.check_options({"cpu_bytes_to_use", "wait", "load"})
    if context.role != "kv_both":
        raise ConfigError(f"kv_role={context.role!r}: OffloadingConnector keeps what it gives, kv_both")
    size = context.storage.block_bytes
    capacity = max(1, context.whole("cpu_bytes_to_use", 4 << 30) // size)
    host = HostBlocks(context.storage, capacity)
    mover = BlockMover(context.storage, host, context.wait())
    return KVConnector(OffloadingScheduler(capacity, context.block_size, context.load_kv_async()), mover)


_BUILT_IN: dict[str, Callable[[ConnectorContext], KVConnector]] = {
    "OffloadingConnector": _offloading,
    "DiskConnector": make_disk_connector,
    "TcpConnector": make_tcp_connector,
}


def names() -> list[str]:
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


def make_connector(
    config: Mapping[str, Any], storage: KVStorage, *, block_size: int, model: Callable[[], str]
) -> KVConnector:
    """From `kv_transfer_config`, as in vLLM: `kv_connector`, `kv_role`, `kv_ip`, `kv_port` and
    `kv_connector_extra_config`.

    Raises ConfigError for an unknown name or option, ConnectorError for an address that cannot be listened on.
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
    ip, port = config.get("kv_ip", "127.0.0.1"), config.get("kv_port", DEFAULT_PORT)
    if not isinstance(ip, str) or not ip:
        raise ConfigError(f"kv_transfer_config: kv_ip={ip!r}: must be an address or the name of a host")
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        raise ConfigError(f"kv_transfer_config: kv_port={port!r}: must be a port, 1 to 65535")
    connector = make(ConnectorContext(storage, block_size, cache(model), role, extra, ip, port))
    return replace(connector, name=str(name))


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"kv_connector_extra_config: {what}")
