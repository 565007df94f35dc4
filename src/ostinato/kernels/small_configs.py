"""How the products of some rows are tiled: a table tuned on an H200."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SmallConfig"]


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
