"""Check mode: the first replays of every key are run twice, as a graph and as an eager call at the same padded shape
with the same inputs, and must agree bit for bit. Before each run, everything that a live row must not read is poisoned.

R rows, T tokens of the step; N blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import torch

from ostinato.errors import StaleGraphError
from ostinato.graphs.check import Twin
from ostinato.graphs.dispatch import Decision
from ostinato.kernels.reference_sampling import stores_logits
from ostinato.kv.storage import KVStorage
from ostinato.runner.host_tables import HostTables
from ostinato.runner.inputs import StepBuffers
from ostinato.runner.state import RequestState
from ostinato.step import StepPlan

_OUT_OF_RANGE = 0x3FFFFFFF
_DERIVED = ("token_ids", "positions", "slot_mapping", "seq_lens", "logit_index")


class StepChecker:
    """`num_replays`: how many replays of each key to check. `free_blocks`: ids that hold nothing anyone may read."""

    def __init__(
        self,
        *,
        num_replays: int,
        poison: bool,
        state: RequestState,
        buffers: StepBuffers,
        storage: KVStorage,
        free_blocks: Callable[[], Iterable[int]],
    ) -> None:
        self._num_replays, self._poison = num_replays, poison
        self._state, self._buffers, self._storage = state, buffers, storage
        self._free_blocks = free_blocks
        self._done: Counter[object] = Counter()
        self._plan: StepPlan | None = None
        self._tables = HostTables()
        self._known: dict[int, list[int]] = {}
        self._twin = Twin(
            snapshot=self._snapshot, restore=self._restore, observe=self._observe, describe=self._describe
        )
        self.num_checked = 0

    def follow(self, plan: StepPlan) -> None:
        """Keeps the host's copy of every row's table and prompt; sees each plan in the order of launches."""
        self._tables.follow(plan)
        for admission in plan.admissions:
            self._known[admission.slot] = list(admission.token_ids)

    def wants(self, decision: Decision) -> bool:
        return self._done[decision.mode, decision.key] < self._num_replays

    def check_all_again(self) -> None:
        """The recordings have changed: the first replays of every key are the next ones."""
        self._done.clear()

    def run(
        self,
        decision: Decision,
        plan: StepPlan,
        replay: Callable[[], None],
        eager: Callable[[], None],
        *,
        all_logits: bool = True,
    ) -> None:
        """Raises StaleGraphError that names request, row, field and both values where the two disagree. `all_logits`:
        the step writes those of every row, not just of rows that need them (`ops.small_linear_sample`)."""
        first = self._done[decision.mode, decision.key] == 0
        self._done[decision.mode, decision.key] += 1
        self._plan = plan
        self._compare_with_host(plan)
        self._twin.run(self._poisoned(replay), self._poisoned(eager), prove=first)
        self._refuse_nan(plan, all_logits)
        self.num_checked += 1

    def _compare_with_host(self, plan: StepPlan) -> None:
        """What the graph is about to read must be what the host has sent: both runs of the twin would read the same
        wrong table and agree."""
        for index, row in enumerate(plan.rows):
            expected = {
                "num_computed": [row.start],
                "block_table": self._tables.rows[row.slot],
                "tokens": self._known[row.slot],
            }
            for name, values in expected.items():
                held = self._state[name][row.slot].reshape(-1)[: len(values)].tolist()
                if held != values:
                    column = next(i for i, (a, b) in enumerate(zip(held, values, strict=True)) if a != b)
                    raise StaleGraphError(
                        f"request {row.request_id}, row {index}, state row {row.slot}: {name}[{column}] is "
                        f"{held[column]} on the device, the host sent {values[column]}"
                    )

    def _refuse_nan(self, plan: StepPlan, all_logits: bool) -> None:
        if not self._poison:
            return
        bad, what = self._buffers.logits[: plan.num_rows].isnan().any(dim=-1), ["logits are"] * plan.num_rows
        if not all_logits:
            # Logits that are not written are poison still. What would make them NaN is in what the head multiplies.
            stored, stream = self._stored(plan), self._buffers.work.stream
            last = stream[self._buffers.logit_index[: plan.num_rows].long()].isnan().any(dim=-1)
            bad = torch.where(stored, bad, last)
            what = ["logits are" if one else "residual stream is" for one in stored.tolist()]
        for index, (row, is_bad) in enumerate(zip(plan.rows, bad.tolist(), strict=True)):
            if is_bad:
                raise StaleGraphError(
                    f"request {row.request_id}, row {index}, state row {row.slot}: {what[index]} NaN: the row has read "
                    "a padded tail, a free block or the scratch block (all poisoned), or the model itself gives NaN "
                    "(run without poison to see)"
                )

    def _stored(self, plan: StepPlan) -> torch.Tensor:
        state, num_vocab = self._state, self._buffers.logits.shape[1]
        names = ("temperature", "top_p", "min_p", "top_k", "flags", "num_logprobs")
        return stores_logits(num_vocab, state["row_slot"][: plan.num_rows], *map(state.named_view, names))

    def _poisoned(self, run: Callable[[], None]) -> Callable[[], None]:
        def poisoned() -> None:
            if self._poison:
                self.poison()
            run()

        return poisoned

    def poison(self) -> None:
        """NaN (or out-of-range ids) in free blocks, the scratch block, every derived input and every workspace."""
        self._storage.fill_blocks([0, *self._free_blocks()], float("nan"))
        for name in self._buffers.pads:
            getattr(self._buffers, name).fill_(_OUT_OF_RANGE)
        work = self._buffers.work
        for tensor in (work.stream, work.qkv, work.attention_out, self._buffers.logits):
            tensor.fill_(float("nan"))
        if work.gathered is not None:
            work.gathered.pool.fill_(float("nan"))

    # -- what Twin needs ---------------------------------------------------------------------------------------------

    def _snapshot(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.clone() for _, tensor in self._state.named())

    def _restore(self, saved: tuple[torch.Tensor, ...]) -> None:
        for (_, tensor), copy in zip(self._state.named(), saved, strict=True):
            tensor.copy_(copy)

    def _observe(self) -> dict[str, torch.Tensor]:
        plan, buffers = self._plan, self._buffers
        assert plan is not None
        num_rows, num_tokens = plan.num_rows, plan.num_tokens
        written = self._storage.cells(buffers.slot_mapping[:num_tokens].long())
        # In the order of the step, so that an error names the first thing that went wrong. Logits that a step does not
        # write, of rows whose head chooses their token, are in both runs what was there before: poison, or an older
        # step's.
        seen = {name: getattr(buffers, name) for name in _DERIVED}
        seen |= {
            "kv": written,
            "stream": buffers.work.stream[:num_tokens],
            "logits": buffers.logits[:num_rows],
            "sampled": buffers.sampled[:num_rows],
            "num_tokens": self._state["num_tokens"],
            "num_computed": self._state["num_computed"],
            "tokens": self._state["tokens"],
            "block_table": self._state["block_table"],
            "output_counts": self._state.output_counts,
        }
        return {name: tensor.clone() for name, tensor in seen.items()}

    def _describe(self, name: str, index: tuple[int, ...]) -> str:
        plan = self._plan
        assert plan is not None
        first = index[0] if index else 0
        if name in ("logits", "sampled", "seq_lens", "logit_index"):
            row = first
        elif name in ("stream", "kv", "token_ids", "positions", "slot_mapping"):
            row, left = 0, first
            while row < plan.num_rows and left >= plan.rows[row].num_tokens:
                left -= plan.rows[row].num_tokens
                row += 1
        else:
            row = next((r for r, planned in enumerate(plan.rows) if planned.slot == first), plan.num_rows)
        if row >= plan.num_rows:
            return f"{name}{list(index)}: a padded row"
        return f"{name}{list(index)}: request {plan.rows[row].request_id}, row {row}, state row {plan.rows[row].slot}"
