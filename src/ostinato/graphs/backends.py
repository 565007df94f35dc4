"""What a recorder asks of the thing that records. Backends are asked, never told apart."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from ostinato.graphs.nodes import GraphNode
from ostinato.graphs.statics import Statics

__all__ = ["Graph", "GraphBackend"]


class Graph(Protocol):
    """Recorded work over fixed addresses."""

    @property
    def num_nodes(self) -> int:
        """Launches in it; 0 when nothing that does work was recorded."""

    def replay(self) -> None:
        """Does the work again, reading and writing the addresses of the recording. Asynchronous where the device is.

        Raises StaleGraphError where the backend can tell that the memory moved.
        """

    def nodes(self) -> tuple[GraphNode, ...]:
        """What was recorded, `num_nodes` of them, in an order in which they may run. For people: takes its time."""


class GraphBackend(Protocol):
    """Turns the work issued between `begin` and `end` into a graph. Recording has no effect but on addresses."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def needs_warm_up(self) -> bool:
        """Whether a step must have run eagerly before it is recorded (lazy loading, tuning, workspaces)."""

    def begin(self, statics: Statics) -> None:
        """Starts a graph that may read and write `statics` and what earlier graphs left behind.

        Raises CaptureError when one is being recorded.
        """

    def end(self) -> Graph:
        """Ends it. Tensors made meanwhile and still alive are its outputs: undefined until a replay writes them."""

    def abort(self) -> None:
        """Drops the graph that is being recorded, if any; `begin` is possible afterwards."""

    def memory(self) -> int:
        """Bytes in use where graphs are kept; what a recording retains is the difference around it."""

    def synchronize(self) -> None:
        """Waits until all work issued so far is done."""

    def close(self) -> None:
        """No graph of this backend is recorded or replayed any more. Safe to call twice."""

    def warm_up_context(self) -> AbstractContextManager[None]:
        """Where warm-up runs, so that it touches what recording will (its stream, its workspaces)."""

    def is_capture_fault(self, error: BaseException) -> bool:
        """Whether a foreign `error` means that a recording did what a graph cannot repeat."""
