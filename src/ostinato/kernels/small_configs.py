"""How the products of some rows are tiled: a table tuned on an H200, and a rule for the shapes that are not in it.

A choice depends on the shapes alone, so it is fixed when a graph is recorded. Measured inside a graph of whole layers
with distinct weights larger than the L2 cache, by `benchmarks/tune_small.py`. None stands for cuBLAS and the separate
ops.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final, Literal

from ostinato.kernels.few_configs import MAX_FEW_ROWS
from ostinato.kernels.small_tuned import HEADS, TUNED

__all__ = ["HEAD_ROWS", "MAX_SMALL_ROWS", "SMALL_ROWS", "Kind", "SmallConfig", "head_config", "small_config"]

SMALL_ROWS: Final = (8, 16, 32, 64, 128, 256)
"""The numbers of rows that configs are for; a step of others takes the config of the next one."""
MAX_SMALL_ROWS: Final = SMALL_ROWS[-1]

HEAD_ROWS: Final = (MAX_FEW_ROWS, *SMALL_ROWS)
"""The same for heads that choose tokens; the first is for steps whose other products are those of few rows."""

Kind = Literal["plain", "gated", "parts"]
"""A linear (QKV, head); gate, up and SwiGLU's product; a linear whose parts its reader adds up (O, down)."""

_RULE_ROWS: Final = 64
_RULE_PROGRAMS: Final = 128
_MANY_OUTPUTS: Final = 32_768


@dataclass(frozen=True, slots=True)
class SmallConfig:
    """The tiling of one product [num_out, size] for some rows."""

    block_m: int
    """Rows of a tile, from 16 on."""
    block_n: int
    """Outputs of a tile (gated: of the gate, and as many of up)."""
    block_k: int
    """Inputs of a step of the loop."""
    num_parts: int
    """Parts that the inputs are cut into; 1 for a product whose sum is needed at once."""
    num_warps: int
    num_stages: int
    """Steps whose tiles are on their way at a time."""
    turned: bool
    """Weights as the left operand: from 64 outputs on a Hopper tensor core then takes them from shared memory."""
    prefetch: int
    """Inputs of each output, a power of two, that are asked for in L2 before the predecessor has ended."""

    def part_size(self, size: int, num_parts: int) -> int:
        """Inputs of a part: whole steps of the loop, of which the last part may have fewer."""
        steps = -(-size // self.block_k)
        return -(-steps // num_parts) * self.block_k


@functools.cache
def small_config(kind: Kind, num_out: int, size: int, num_rows: int) -> SmallConfig | None:
    """The config of a product [num_out, size] (gated: of each half) for some rows, or None where cuBLAS is to do it:
    above MAX_SMALL_ROWS, where it did better, and in shapes that were not measured and do not consist of whole
    tiles."""
    rows = next((rows for rows in SMALL_ROWS if num_rows <= rows), None)
    if rows is None or num_rows < 1:
        return None
    if (kind, num_out, size, rows) in TUNED:
        fields = TUNED[kind, num_out, size, rows]
        return None if fields is None else SmallConfig(*fields)
    if rows > _RULE_ROWS or size % 64 or num_out % 16:
        return None
    return _by_shape(kind, num_out, size, rows)


def head_config(num_vocab: int, size: int, num_rows: int) -> SmallConfig | None:
    """The config of a head [num_vocab, size] that chooses the tokens of some rows itself (`ops.small_linear_sample`),
    or None where logits are to be written and sampled from: whatever is not in the table."""
    rows = next((rows for rows in HEAD_ROWS if num_rows <= rows), None)
    fields = None if rows is None or num_rows < 1 else HEADS.get((num_vocab, size, rows))
    return None if fields is None else SmallConfig(*fields)


def _by_shape(kind: Kind, num_out: int, size: int, num_rows: int) -> SmallConfig | None:
    """What the table's entries have in common: all rows in one tile; up to 32 rows 64 outputs a tile with the weights
    as left operand, at 64 rows 32; steps of 128 inputs, six on their way, or three where there are programs enough for
    two a multiprocessor; and parts until there are some 128 programs."""
    block_m = max(num_rows, 16)
    wide = num_rows <= 32
    if kind == "parts":
        block_n = 64 if wide else 16 if num_out < 2048 else 32
        wanted = max(1, min(8, _RULE_PROGRAMS // -(-num_out // block_n), size // 512))
        # Parts are whole steps of the loop, so there can be fewer of them than wanted: 29 steps in 7 parts are 6 of 5.
        steps = -(-size // 128)
        num_parts = -(-steps // -(-steps // wanted))
        return SmallConfig(block_m, block_n, 128, num_parts, 4, 6, wide, min(512, _power_of_2(size // num_parts)))
    prefetch = min(512, _power_of_2(size))
    if kind == "gated":
        if num_rows == 32:
            many = num_out >= 8192
            return SmallConfig(32, 64 if many else 16, 64 if many else 128, 1, 4, 5 if many else 3, many, prefetch)
        return SmallConfig(block_m, 32, 128, 1, 4, 3, False, prefetch)
    if num_out > _MANY_OUTPUTS:
        return SmallConfig(block_m, 64, 128, 1, 4, 3, wide, prefetch)
    if num_out >= (4096 if wide else 6144):
        return SmallConfig(block_m, 64, 128, 1, 4, 6, wide, prefetch)
    if num_rows <= 16:
        return None  # too few outputs for 64 a tile, and with 32 a tile cuBLAS was as fast
    return SmallConfig(block_m, 32, 128, 1, 4, 6, False, prefetch)


def _power_of_2(n: int) -> int:
    """The largest that is not above n."""
    return 1 << (n.bit_length() - 1)
