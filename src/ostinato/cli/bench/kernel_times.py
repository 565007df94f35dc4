"""Kernels that ran on a device, split into decode steps and given their shares of the step. No torch.

A kernel that is launched programmatically starts before its predecessor ends, so durations add up to more than the
step. Each kernel is therefore attributed what lies between the end of the one that ended before it and its own end:
these shares add up to the step exactly, and a wait for nothing counts for the kernel that came after it.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

FIRST_KERNEL, LAST_KERNEL = "prepare_kernel", "advance_kernel"
"""Every step begins with the first and ends with the last. What runs between two steps are the host's differences."""


class KernelEvent(NamedTuple):
    name: str
    start_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


class KernelShare(NamedTuple):
    """`raw_us` is the duration, `attributed_us` the part of the step that is the kernel's alone."""

    name: str
    attributed_us: float
    raw_us: float


@dataclass(frozen=True, slots=True)
class KernelStep:
    """One step: its kernels in the order of their start, how long it took, and the time until the next one started.

    `staged_us` is the part of that gap in which something ran: copies and kernels between two steps.
    """

    kernels: tuple[KernelShare, ...]
    duration_us: float
    gap_us: float
    staged_us: float


def attribute(events: Sequence[KernelEvent]) -> list[KernelShare]:
    """Shares in the order of `events`; they add up to the time from the first start to the last end."""
    shares = [0.0] * len(events)
    last_end = min((event.start_us for event in events), default=0.0)
    for index in sorted(range(len(events)), key=lambda index: events[index].end_us):
        shares[index] = events[index].end_us - last_end
        last_end = events[index].end_us
    return [KernelShare(e.name, share, e.duration_us) for e, share in zip(events, shares, strict=True)]


def split_steps(events: Sequence[KernelEvent]) -> list[KernelStep]:
    """The steps that are there from their first kernel to the next one's; what lies before and after is left out."""
    ordered = sorted(events, key=lambda event: event.start_us)
    firsts = [index for index, event in enumerate(ordered) if event.name == FIRST_KERNEL]
    steps = []
    for start, end in pairwise(firsts):
        group = ordered[start:end]
        size = next((i + 1 for i in reversed(range(len(group))) if group[i].name == LAST_KERNEL), len(group))
        kernels, staged = group[:size], group[size:]
        ends = max(event.end_us for event in kernels)
        shares = attribute(kernels)
        steps.append(
            KernelStep(
                kernels=tuple(shares),
                duration_us=ends - kernels[0].start_us,
                gap_us=ordered[end].start_us - ends,
                staged_us=sum(event.duration_us for event in staged),
            )
        )
    return steps


def by_kind(steps: Sequence[KernelStep]) -> list[dict[str, Any]]:
    """Medians over steps of what all kernels of a name take together; the costliest name first."""
    rows = []
    whole = statistics.median(step.duration_us for step in steps)
    for name in {kernel.name for step in steps for kernel in step.kernels}:
        of_name = [[kernel for kernel in step.kernels if kernel.name == name] for step in steps]
        attributed = statistics.median(sum(kernel.attributed_us for kernel in kernels) for kernels in of_name)
        rows.append(
            {
                "name": name,
                "calls": statistics.median(len(kernels) for kernels in of_name),
                "attributed_us": attributed,
                "raw_us": statistics.median(sum(kernel.raw_us for kernel in kernels) for kernels in of_name),
                "share": attributed / whole,
            }
        )
    return sorted(rows, key=lambda row: (-row["attributed_us"], row["name"]))


def is_attention(name: str) -> bool:
    """Whether a kernel of this name begins the attention of a layer. What merges the splits of one does not."""
    return "attention" in name or "FlashAttnFwdSm90" in name or name.startswith(("decode_", "prefill_"))


def attention_starts(
    names: Sequence[str], num_layers: int, begins: Callable[[str], bool] = is_attention
) -> list[int] | None:
    """Where the attention of each layer begins, in a step of these kernels. None where the kernels of attention are not
    a whole number for each layer."""
    starts = [index for index, name in enumerate(names) if begins(name)]
    return None if not starts or len(starts) % num_layers else starts[:: len(starts) // num_layers]


def by_layer(
    steps: Sequence[KernelStep], num_layers: int, begins: Callable[[str], bool] = is_attention
) -> dict[str, Any] | None:
    """Attributed us, medians over steps: `before_us` until the first attention, `layers_us` from each attention to the
    next one, one fewer than the model has, and `after_us` from the last attention on, the head and sampling included.
    None where the kernels of attention are not a whole number for each layer in every step."""
    found = []
    for step in steps:
        starts = attention_starts([kernel.name for kernel in step.kernels], num_layers, begins)
        if starts is None:
            return None
        bounds = [0, *starts, len(step.kernels)]
        found.append([sum(k.attributed_us for k in step.kernels[start:end]) for start, end in pairwise(bounds)])
    if not found:
        return None
    before, *layers, after = (statistics.median(column) for column in zip(*found, strict=True))
    return {"before_us": before, "layers_us": layers, "after_us": after}


def sequence(steps: Sequence[KernelStep]) -> list[dict[str, Any]]:
    """The kernels of a step in their order, medians over those steps that ran what most did, in the same order."""
    usual = Counter(tuple(kernel.name for kernel in step.kernels) for step in steps).most_common(1)
    same = [step for step in steps if usual and tuple(kernel.name for kernel in step.kernels) == usual[0][0]]
    return [
        {
            "name": column[0].name,
            "attributed_us": statistics.median(kernel.attributed_us for kernel in column),
            "raw_us": statistics.median(kernel.raw_us for kernel in column),
        }
        for column in zip(*(step.kernels for step in same), strict=True)
    ]


def summary(steps: Sequence[KernelStep], num_layers: int) -> dict[str, Any]:
    """Everything above, for at least one step."""
    return {
        "num_steps": len(steps),
        "step_us": statistics.median(step.duration_us for step in steps),
        "gap_us": statistics.median(step.gap_us for step in steps),
        "staged_us": statistics.median(step.staged_us for step in steps),
        "kinds": by_kind(steps),
        "layers": by_layer(steps, num_layers),
        "sequence": sequence(steps),
    }
