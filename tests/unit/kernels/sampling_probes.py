"""Kernels that expose parts of the sampler on their own. A module of its own, as Triton sees only module scope."""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.kernels.triton_logits import CHUNK, LANE, noise_of, noise_tile
from ostinato.kernels.triton_sampling import _least_kept


@triton.jit
def noise_kernel(out, seeds, num_tokens):
    """Grid (V / CHUNK,): the noise of each token."""
    chunk = tl.program_id(0)
    ids = tl.arange(0, 4)[:, None] * LANE + tl.arange(0, LANE)[None, :] + chunk * CHUNK
    tl.store(out + ids, noise_tile(chunk, tl.load(seeds), tl.load(seeds + 1), tl.load(num_tokens)))


@triton.jit
def noise_of_kernel(out, ids, seeds, lengths, SIZE: tl.constexpr):
    """Grid (1,): the noise of any SIZE tokens for two rows, `out [2, SIZE]`."""
    row, column = tl.arange(0, 2)[:, None], tl.arange(0, SIZE)[None, :]
    all_ids = tl.load(ids + column) + 0 * row
    found = noise_of(all_ids, tl.load(seeds + row), tl.load(seeds + 2 + row), tl.load(lengths + row))
    tl.store(out + row * SIZE + column, found)


@triton.jit
def least_kept_kernel(logits, num_vocab, largest, top_k, top_p, min_p, out):
    """Grid (R,): the least logit that each row keeps at temperature 1."""
    row = tl.program_id(0)
    logits += row * num_vocab
    best = tl.load(largest + row)
    tl.store(out + row, _least_kept(logits, logits, 0, 1.0, num_vocab, best, top_k, top_p, min_p, row))
