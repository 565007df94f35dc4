"""CPU implementation of the sampler: the spec, the oracle of the Triton kernels, and what a CPU runs.

A row's logits pass, in this order (vLLM's), through

1. logit bias, added;
2. the ban of stop ids while the row is shorter than `min_length`, and of all tokens that `allowed` does not have;
3. the penalties of ids seen before: repetition (Keskar et al. 2019; prompt and output: positive logits are divided,
   negative ones multiplied), frequency and presence (OpenAI's; output only: subtracted);
4. temperature: below MIN_TEMPERATURE the largest logit wins, lowest id first, and the rest does not apply;
5. the filters, each a least logit: min-p keeps p >= min_p * max(p); top-k keeps what is not below the k-th largest;
   top-p (Holtzman et al. 2019) the shortest run of largest logits whose share of what is left reaches top_p. Logits
   equal to the least one are kept, so no sort order is ever seen in the result;
6. the Gumbel-max trick (Gumbel 1954): the argmax of logit + g is a draw from the softmax if g = -log(-log(u)).

u comes from Philox4x32-10 (Salmon et al. 2011) with key (seed_lo, seed_hi) and counter (c, num_tokens, 0, 0). Token v
uses word `v // 1024 % 4` of the counter c = `v // 4096 * 1024 + v % 1024`, so one call serves four tokens that
are 1024 apart. A draw therefore depends on the row's seed, length and logits, never on its place in a batch.

Rows are numpy views of the tensors: numpy has unsigned integers, and for a vocabulary of 49152 its argmax takes 5 us
and its sort 0.3 ms where torch takes 50 us and 4 ms.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

FLAG_PENALTIES = 1
FLAG_LOGIT_BIAS = 2
FLAG_MIN_LENGTH = 4
FLAG_ALLOWED = 8
"""Bits of `flags`: what may change the row's logits. Rows without any skip steps 1 to 3 unread."""

MIN_TEMPERATURE = 1e-5
"""Below it a row is greedy: dividing by less overflows float32, and no two logits would be close enough to matter."""

LANE = 1024
"""The four tokens that share a Philox counter are this far apart."""

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.integer[Any]]
Words: TypeAlias = npt.NDArray[np.uint64]

_PHILOX_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_GUMBEL_SPREAD = 20.0  # more than the largest minus the smallest g: 16.64 - -2.82


def sample(
    logits: Tensor,
    row_slot: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    repetition_penalty: Tensor,
    presence_penalty: Tensor,
    frequency_penalty: Tensor,
    top_k: Tensor,
    seed_lo: Tensor,
    seed_hi: Tensor,
    min_length: Tensor,
    num_tokens: Tensor,
    stop_ids: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    output_counts: Tensor,
    in_prompt: Tensor,
    allowed: Tensor,
    flags: Tensor,
    adjusted: Tensor,
    sampled: Tensor,
) -> None:
    """See `ops.sample`."""
    num_rows = logits.shape[0]
    sampled.fill_(-1)
    slots = row_slot[:num_rows].long()
    live = slots != temperature.shape[0] - 1
    plain = (flags[slots] == 0) & (temperature[slots] < MIN_TEMPERATURE)
    best = torch.from_numpy(_argmax(_as_floats(logits))).int()
    sampled[:num_rows] = torch.where(live, best, -1)

    for r in (live & ~plain).nonzero().flatten().tolist():
        s = int(slots[r])
        row = _as_floats(logits[r])
        changes = int(flags[s])
        if changes:
            adjusted[r].copy_(logits[r])
            row = adjusted[r].numpy()
            if changes & FLAG_LOGIT_BIAS:
                _add_bias(row, bias_ids[s].numpy(), bias_values[s].numpy())
            if changes & FLAG_PENALTIES:
                penalties = (float(x[s]) for x in (repetition_penalty, frequency_penalty, presence_penalty))
                _penalise(row, output_counts[s].numpy(), in_prompt[s].numpy(), *penalties)
            if changes & FLAG_MIN_LENGTH and num_tokens[s] < min_length[s]:
                banned = stop_ids[s].numpy()
                row[banned[_is_token(banned, row)]] = -np.inf  # last, as no penalty brings a banned id back
            if changes & FLAG_ALLOWED:
                bits = np.unpackbits(allowed[s].numpy().view(np.uint8), bitorder="little")[: row.size]
                row[bits == 0] = -np.inf
        if temperature[s] < MIN_TEMPERATURE:
            sampled[r] = int(_argmax(row[None])[0])
            continue
        scaled = _without_nan(row) * np.float32(1.0 / temperature[s])
        least = least_logit(scaled, int(top_k[s]), float(top_p[s]), float(min_p[s]))
        sampled[r] = _draw(scaled, least, int(seed_lo[s]), int(seed_hi[s]), int(num_tokens[s]))


def stores_logits(
    num_vocab: int,
    row_slot: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    flags: Tensor,
    num_logprobs: Tensor,
) -> Tensor:
    """Which rows `ops.small_linear_sample` writes the logits of, [R] bool: what it takes to choose the tokens of the
    others, and nobody reads more of them, is known tile by tile. On any device."""
    filters = ((top_k > 0) & (top_k < num_vocab)) | (top_p < 1.0) | (min_p > 0.0)
    wanted = (flags != 0) | (num_logprobs >= 0) | (filters & (temperature >= MIN_TEMPERATURE))
    slots = row_slot.long()
    return wanted[slots] & (slots != temperature.shape[0] - 1)


def logprobs(
    logits: Tensor, row_slot: Tensor, num_logprobs: Tensor, sampled: Tensor, out_values: Tensor, out_ids: Tensor
) -> None:
    """See `ops.logprobs`."""
    slots = row_slot[: logits.shape[0]].long()
    wanted = torch.where(slots == num_logprobs.shape[0] - 1, -1, num_logprobs[slots])
    for r in (wanted >= 0).nonzero().flatten().tolist():
        row = _without_nan(_as_floats(logits[r]))
        token = int(sampled[r])
        total = _log_sum_exp(row)
        log_shares = row - total if np.isfinite(total) else row  # without any finite logit all stay -inf
        top = _top_ids(row, min(int(wanted[r]), row.size))
        values, ids = out_values[r].numpy(), out_ids[r].numpy()
        values.fill(-np.inf)
        ids.fill(-1)
        values[:2] = log_shares[token], total
        ids[:2] = token, np.count_nonzero(row > row[token]) + 1
        values[2 : 2 + top.size] = log_shares[top]
        ids[2 : 2 + top.size] = top


def least_logit(scaled: Floats, top_k: int, top_p: float, min_p: float) -> float:
    """The least logit that survives step 5, given tempered logits `[V]` without NaN; -inf if no filter is on."""
    largest = float(scaled.max())
    least = -math.inf
    if not math.isfinite(largest):
        return least
    if min_p > 0.0:
        least = largest + math.log(min_p)
    if 0 < top_k < scaled.size:
        least = max(least, float(np.partition(scaled, scaled.size - top_k)[scaled.size - top_k]))
    if top_p < 1.0:
        run = np.sort(scaled[scaled >= least])[::-1]
        share = np.exp(run - largest).cumsum()
        last = int(np.searchsorted(share, np.float32(top_p) * share[-1]))
        least = float(run[min(last, run.size - 1)])
    return least


def gumbel(ids: Ints, seed_lo: int, seed_hi: int, num_tokens: int) -> Floats:
    """Gumbel noise, in (-2.82, 16.64), of the token ids `ids`: a call of Philox for each."""
    words = philox(ids // (4 * LANE) * LANE + ids % LANE, seed_lo, seed_hi, num_tokens)
    return _noise(words[ids // LANE % 4, np.arange(ids.size)])


def gumbel_all(num_ids: int, seed_lo: int, seed_hi: int, num_tokens: int) -> Floats:
    """The same of the ids 0 .. num_ids - 1: a call of Philox for each four."""
    words = philox(np.arange(_num_counters(num_ids)), seed_lo, seed_hi, num_tokens)
    return _noise(words).reshape(4, -1, LANE).transpose(1, 0, 2).reshape(-1)[:num_ids]


def philox(counters: Ints, key_lo: int, key_hi: int, counter_1: int) -> Words:
    """Philox4x32-10 of the counters (counters[i], counter_1, 0, 0): `[4, n]`, 32-bit words in uint64."""
    word, half = np.uint64(_WORD), np.uint64(32)
    c0 = counters.astype(np.uint64)
    c1, c2, c3 = np.full_like(c0, counter_1 & _WORD), np.zeros_like(c0), np.zeros_like(c0)
    key_lo, key_hi = key_lo & _WORD, key_hi & _WORD
    for _ in range(10):
        product_0, product_1 = c0 * _PHILOX_MULTIPLIERS[0], c2 * _PHILOX_MULTIPLIERS[1]
        # c1 and c3 keep whole products: they are only ever xor-ed into c0 and c2, which are masked here.
        c0 = ((product_1 >> half) ^ c1 ^ np.uint64(key_lo)) & word
        c2 = ((product_0 >> half) ^ c3 ^ np.uint64(key_hi)) & word
        c1, c3 = product_1, product_0
        key_lo, key_hi = (key_lo + _PHILOX_KEY_STEPS[0]) & _WORD, (key_hi + _PHILOX_KEY_STEPS[1]) & _WORD
    return np.stack((c0, c1 & word, c2, c3 & word))


def _draw(scaled: Floats, least: float, seed_lo: int, seed_hi: int, num_tokens: int) -> int:
    """The winner of step 6 among the tempered logits not below `least`."""
    # What is further than the noise's spread below the largest cannot win: it may lack its noise.
    kept = scaled >= max(least, float(scaled.max()) - _GUMBEL_SPREAD)
    if np.count_nonzero(kept) < _num_counters(scaled.size):
        ids = np.flatnonzero(kept)
        return int(ids[np.argmax(scaled[ids] + gumbel(ids, seed_lo, seed_hi, num_tokens))])
    noisy = scaled + gumbel_all(scaled.size, seed_lo, seed_hi, num_tokens)
    return int(np.argmax(np.where(kept, noisy, np.float32(-np.inf))))


def _num_counters(num_ids: int) -> int:
    return -(-num_ids // (4 * LANE)) * LANE


def _noise(words: Words) -> Floats:
    # 23 bits, in the middle of their interval: exact in float32 and never 0 or 1, whose noise would be infinite.
    uniform = (words >> np.uint64(9)).astype(np.float32) * np.float32(2.0**-23) + np.float32(2.0**-24)
    noise: Floats = -np.log(-np.log(uniform))
    return noise


def _argmax(rows: Floats) -> Ints:
    """Lowest index of each row's largest logit, `[R, V]` -> `[R]`; a NaN counts as -inf."""
    ids: Ints = rows.argmax(-1)
    if np.isnan(np.take_along_axis(rows, ids[:, None], -1)).any():  # argmax() gives the first NaN precedence
        ids = _without_nan(rows).argmax(-1)
    return ids


def _log_sum_exp(row: Floats) -> np.float32:
    largest = np.float32(row.max())
    return largest + np.log(np.exp(row - largest).sum()) if np.isfinite(largest) else largest


def _top_ids(row: Floats, count: int) -> Ints:
    """Ids of the `count` largest of `row [V]`, largest first and lower ids first among equals."""
    if count == 0:
        return np.empty(0, np.int64)
    least = np.partition(row, row.size - count)[row.size - count]
    ids = np.flatnonzero(row >= least)
    order = np.argsort(-row[ids], kind="stable")[:count]
    return ids[order]


def _add_bias(row: Floats, ids: Ints, values: Floats) -> None:
    given = _is_token(ids, row)
    row[ids[given]] += values[given]


def _is_token(ids: Ints, row: Floats) -> npt.NDArray[np.bool_]:
    return (ids >= 0) & (ids < row.size)


def _penalise(
    row: Floats, counts: Ints, in_prompt: npt.NDArray[np.bool_], repetition: float, frequency: float, presence: float
) -> None:
    """Step 3, in place, on the few ids that have been seen."""
    ids = np.flatnonzero(in_prompt | (counts > 0))
    seen, factor = row[ids], np.float32(repetition)
    row[ids] = np.where(seen > 0, seen / factor, seen * factor)
    ids = np.flatnonzero(counts)
    row[ids] -= np.float32(frequency) * counts[ids].astype(np.float32) + np.float32(presence)


def _as_floats(logits: Tensor) -> Floats:
    array: Floats = logits.detach().float().numpy()
    return array


def _without_nan(row: Floats) -> Floats:
    return np.where(np.isnan(row), np.float32(-np.inf), row)
