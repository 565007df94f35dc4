"""The random stream: Philox4x32-10's published answers, and the same noise per token in both implementations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ops_case import TRITON, require_triton

from ostinato.kernels.reference_sampling import LANE, gumbel, gumbel_all, philox

WORD = 0xFFFFFFFF


def philox_by_definition(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Salmon et al. 2011, section 3.3 and its constants, on Python's integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & WORD, (left >> 32) ^ c3 ^ k1, left & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD,) * 4, (WORD, WORD), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_definition_gives_the_answers_of_random123(
    counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]
) -> None:
    assert philox_by_definition(counter, key) == answer


def test_philox_known_answer() -> None:
    assert philox(np.zeros(3, np.int64), 0, 0, 0).T.tolist() == [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]] * 3


@pytest.mark.parametrize(("key_lo", "key_hi", "length"), [(0, 0, 1), (-1, 5, 8191), (123456789, -(2**31), 2**31 - 1)])
def test_philox_is_the_definition(key_lo: int, key_hi: int, length: int) -> None:
    counters = np.array([0, 1, 1023, 1024, 65535, WORD])
    words = philox(counters, key_lo, key_hi, length)
    for column, counter in zip(words.T.tolist(), counters.tolist(), strict=True):
        assert tuple(column) == philox_by_definition((counter, length, 0, 0), (key_lo & WORD, key_hi & WORD))


def test_noise_of_a_token_does_not_depend_on_which_tokens_are_asked_for() -> None:
    """Both ways of computing it, at the token's documented counter and word."""
    num_vocab = 3 * 4 * LANE + 5
    everything = gumbel_all(num_vocab, 17, -4, 60)
    few = np.array([0, 1023, 1024, 4095, 4096, 4097, 9999, num_vocab - 1])
    assert np.array_equal(gumbel(few, 17, -4, 60), everything[few])
    for token in few.tolist():
        counter = (token // 4096 * 1024 + token % 1024, 60, 0, 0)
        word = philox_by_definition(counter, (17, -4 & WORD))[token // 1024 % 4]
        uniform = ((word >> 9) + 0.5) * 2.0**-23
        assert everything[token] == pytest.approx(-np.log(-np.log(uniform)), rel=1e-5, abs=1e-6)


def test_noise_is_gumbel_and_finite_at_the_extremes() -> None:
    noise = gumbel_all(200_000, 1, 2, 3).astype(np.float64)
    assert noise.mean() == pytest.approx(0.577216, abs=0.01)  # Euler's constant
    assert noise.var() == pytest.approx(np.pi**2 / 6, rel=0.01)
    largest, least = np.float32(1 - 2.0**-24), np.float32(2.0**-24)
    assert largest < 1 and -np.log(-np.log(largest)) == pytest.approx(16.64, abs=0.01)
    assert -np.log(-np.log(least)) == pytest.approx(-2.81, abs=0.01)


def test_triton_draws_the_same_stream() -> None:
    require_triton()
    from sampling_probes import noise_kernel

    for seed_lo, seed_hi, length in ((0, 0, 1), (-5, 2**31 - 1, 4097), (2**30, -(2**31), 7)):
        out = torch.zeros(3 * 4096, device=TRITON.device)
        noise_kernel[(3,)](out, TRITON.ints(seed_lo, seed_hi), TRITON.ints(length))
        expected = torch.from_numpy(gumbel_all(3 * 4096, seed_lo, seed_hi, length))
        # Equal words; the two logarithms may differ in their last bit.
        torch.testing.assert_close(out.cpu(), expected, atol=2e-6, rtol=2e-6)


def test_triton_has_the_same_noise_for_any_tokens_and_several_rows() -> None:
    require_triton()
    from sampling_probes import noise_of_kernel

    ids = [0, 1, 1023, 1024, 2047, 2048, 3072, 4095, 4096, 5119, 5120, 9999, 151_935, 7, 7, 131_072]
    lows, highs, lengths = (-5, 2**30), (2**31 - 1, -(2**31)), (4097, 7)
    out = torch.zeros(2, len(ids), device=TRITON.device)
    noise_of_kernel[(1,)](out, TRITON.ints(*ids), TRITON.ints(*lows, *highs), TRITON.ints(*lengths), SIZE=len(ids))
    for row, seeds in enumerate(zip(lows, highs, lengths, strict=True)):
        expected = torch.from_numpy(gumbel(np.array(ids), *seeds))
        torch.testing.assert_close(out[row].cpu(), expected, atol=2e-6, rtol=2e-6)
