"""What a KV connector is: a scheduler's side, which decides, and a worker's side, which moves. vLLM's names where vLLM
has the thing (`vllm.distributed.kv_transfer.kv_connector.v1`). No torch.

The two sides talk through one object a step, which the engine carries and does not look into. Blocks are named by
their place in the pool and by the digest of the whole prefix that they end (`kv.prefix`). Only blocks of live requests,
or of the prefix cache, are ever shown to a connector; the scratch block and padding are not.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from ostinato.request import Request

if TYPE_CHECKING:
    import torch

__all__ = [
    "AsyncKVConnectorScheduler",
    "ConnectorStats",
    "ContentsKVConnectorScheduler",
    "KVConnector",
    "KVConnectorScheduler",
    "KVConnectorWorker",
    "LoadedKV",
    "Matched",
    "Wait",
]


class Wait(enum.StrEnum):
    """How a step waits for KV that is on its way to the pool.

    STEP: as a whole, before it begins. HOOKS: layer by layer, in host code between graphs: a step with something to
    wait for then runs PIECEWISE, others as ever. EVENTS: layer by layer, by an event that the recorded graph itself
    waits for.
    """

    STEP = "step"
    HOOKS = "hooks"
    EVENTS = "events"


@dataclass(frozen=True, slots=True)
class ConnectorStats:
    """Since the start. `hit_tokens` of `query_tokens` that the prefix cache did not hold came from the connector, for
    `async_loads` requests without a step that waits for them.

    `held_blocks` of at most `capacity_blocks` are in host memory now. `deferred_requests` had to wait until it was
    known what can be loaded. `failed_loads` are attempts that broke off, so that the rest was computed; `failed_saves`
    are blocks that were not kept, `pending_saves` those on their way. `fetched_blocks` came from another process, by
    transport; also those that no request has loaded yet.
    """

    query_tokens: int = 0
    hit_tokens: int = 0
    loaded_blocks: int = 0
    saved_blocks: int = 0
    held_blocks: int = 0
    capacity_blocks: int = 0
    deferred_requests: int = 0
    failed_loads: int = 0
    failed_saves: int = 0
    pending_saves: int = 0
    async_loads: int = 0
    fetched_blocks: Mapping[str, int] = field(default_factory=dict)


Matched = int | tuple[int | None, bool | None] | None
"""What `get_num_new_matched_tokens` may return."""


class LoadedKV(NamedTuple):
    """An asynchronous load that writes no more. The first `num_tokens` of its tokens are there, in full blocks; the
    others will be computed."""

    request: Request
    num_tokens: int


class KVConnectorScheduler(Protocol):
    """Called on the engine's thread while steps are planned and taken in. Ids and counts only."""

    def get_num_new_matched_tokens(
        self, request: Request, block_hashes: Sequence[bytes], num_computed_tokens: int
    ) -> Matched:
        """Tokens beyond the first `num_computed_tokens`, in full blocks, whose KV can be loaded. `block_hashes` are
        those of the blocks that may be: not of the last known token's. None: not known yet, ask at a later step.

        Or, as in vLLM, that number and `load_kv_async`, for an `AsyncKVConnectorScheduler`: True to load without a step
        that waits, False to load in the step that admits the request, as for a number alone; here also None, for
        whichever suits what else runs.
        """

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_computed_tokens: int, num_external_tokens: int
    ) -> None:
        """The request has its table `block_ids`, and the `num_external_tokens` after `num_computed_tokens` are to be
        loaded by the step that is being planned. Zero of them: nothing is."""

    def blocks_computed(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Blocks of a live request whose content is complete and can now be found by its digest."""

    def block_evicted(self, block_id: int, block_hash: bytes) -> None:
        """The step that is being planned takes this block for another content: the last chance to save it."""

    def build_connector_meta(self) -> object | None:
        """What the worker's side has to do for the step that was just planned; None for nothing. Asked without a step
        too, when none may come: there is then nothing that a step loads, and the rest is begun at once."""

    def update_connector_output(self, finished: Sequence[object]) -> None:
        """What the worker's side reports as done (`get_finished`)."""

    def step_dropped(self, meta: object) -> None:
        """The step of this meta was not launched, and whether its transfers were begun is unknown."""

    def request_finished(self, request: Request) -> None:
        """The request is over, or has lost its blocks."""

    def forget_contents(self) -> None:
        """What was saved so far holds no more: the weights have changed."""

    def wait_for_change(self, timeout_s: float) -> None:
        """Nothing can run before `get_num_new_matched_tokens` knows more: returns when it may, or after the time."""

    def stats(self) -> ConnectorStats: ...

    def close(self) -> None:
        """After the worker's side. Safe to call twice."""


@runtime_checkable
class AsyncKVConnectorScheduler(KVConnectorScheduler, Protocol):
    """One that can load KV into the blocks of a request while steps run that the request has no part in.

    Such a load is part of the next meta, with a step or without one; no step waits for it. Its blocks stay the
    request's until it is reported, whatever becomes of the request. So every load must be: one that fails, one whose
    request has ended, and one whose meta was dropped, each once nothing of it can write any more.
    """

    def update_state_after_alloc(
        self,
        request: Request,
        block_ids: Sequence[int],
        num_computed_tokens: int,
        num_external_tokens: int,
        load_kv_async: bool = False,
    ) -> None:
        """With `load_kv_async` the load is one of these: at most one for a request at a time."""

    def get_finished_recving(self) -> Sequence[LoadedKV]:
        """Those that have ended since the last call, as far as `update_connector_output` has heard. Steps launched from
        now on find what was loaded."""


@runtime_checkable
class ContentsKVConnectorScheduler(KVConnectorScheduler, Protocol):
    """One whose blocks outlive the weights that they were computed with, or go to other engines."""

    def set_contents(self, name: str) -> None:
        """What KV is of from now on, after `forget_contents`: as `ConnectorContext.model`, equal names for equal
        weights only. Nothing that was saved under another name may be found."""


class KVConnectorWorker(Protocol):
    """Called where steps are launched."""

    @property
    def wait(self) -> Wait: ...

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors at fixed addresses that recorded steps read, with names for errors."""

    def requires_piecewise_for_cudagraph(self, meta: object | None) -> bool:
        """Whether this step needs host code in its layers. Asked for each step."""

    def start_load_kv(self, meta: object | None) -> None:
        """Before a step is launched: begins what its meta asks for. The step may overwrite blocks that are being saved,
        so it must be made to wait for that; not for loads, unless `wait` is STEP, and never for asynchronous ones. They
        may overwrite blocks that are being saved too, and must come after. Also called without a step, for saves and
        asynchronous loads."""

    def wait_for_layer_load(self, layer: int) -> None:
        """HOOKS: on the host, before this layer's attention."""

    def save_kv_layer(self, layer: int) -> None:
        """HOOKS: on the host, after this layer's attention."""

    def wait_in_graph(self, layer: int) -> None:
        """EVENTS: issues the wait for this layer's load, to be recorded or done."""

    def wait_for_loads(self, timeout_s: float) -> bool:
        """The step of the newest `start_load_kv` was not launched: waits on the host, for so long at most, until none
        of its loads can write any more; whether that is so. Not for asynchronous loads. One that failed has ended."""

    def wait_for_save(self) -> None:
        """After a step was launched: all of its saves are under way."""

    def get_finished(self) -> Sequence[object]:
        """What is done since the last call, for the scheduler's side. Does not wait."""

    def close(self) -> None:
        """Waits for what is under way, then lets memory and threads go. Safe to call twice."""


@dataclass(frozen=True, slots=True)
class KVConnector:
    """Both sides of one connector. `name` is that of `kv_connector`, for errors."""

    scheduler: KVConnectorScheduler
    worker: KVConnectorWorker
    name: str = "the KV connector"

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()
