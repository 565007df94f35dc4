"""Heads that choose tokens: the tokens of the separate ops, and logits of the rows that need them alone."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from ops_case import GPU, TORCH, TRITON, draw, require_triton, sampling_state
from torch import Tensor

from ostinato.kernels import ops, reference_small, small_configs
from ostinato.kernels.reference_sampling import stores_logits
from ostinato.kernels.small_configs import HEAD_ROWS, SmallConfig, head_config
from ostinato.kernels.small_tuned import HEADS

# The interpreter's bfloat16 arithmetic is wrong, so that the kernels see it only on a GPU.
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if GPU else [torch.float32, torch.float16]
NUM_SLOTS = 11
SCRATCH = NUM_SLOTS - 1
NAMES = ("greedy", "drawn", "top_k", "penalised", "logprobs", "banned", "drawn hot", "greedy with filters", "min_p",
         "biased and drawn")  # fmt: skip
"""What the state rows 0 to 9 are; `STORED` are those whose logits somebody reads."""
STORED = {2, 3, 4, 5, 8, 9}


@dataclasses.dataclass(frozen=True)
class Case:
    x: Tensor  # [R, K]
    weight: Tensor  # [V, K]
    slots: list[int]
    state: ops.SamplingState
    num_logprobs: Tensor

    @property
    def num_vocab(self) -> int:
        return self.weight.shape[0]

    def run(self, device: str, config: SmallConfig | None) -> tuple[list[int], Tensor]:
        """Tokens of all rows and three more, and the logits' buffer, which was 7; without a config by the reference."""
        num_rows = self.x.shape[0]
        logits = torch.full((num_rows, self.num_vocab + 3), 7.0, dtype=self.x.dtype, device=device)[:, 1:-2]
        adjusted = torch.full((num_rows, self.num_vocab), math.nan, device=device)
        sampled = torch.full((num_rows + 3,), 99, dtype=torch.int32, device=device)
        slots = torch.tensor(self.slots, dtype=torch.int32, device=device)
        state = ops.SamplingState(*(tensor.to(device) for tensor in self.state))
        tensors = (self.num_logprobs.to(device), logits, adjusted, sampled)
        x, weight = self.x.to(device), self.weight.to(device)
        if config is None:
            reference_small.small_linear_sample(x, weight, slots, *state, *tensors)
        else:
            from ostinato.kernels.triton_small_head import launch_head

            launch_head(config, x, weight, slots, state, *tensors)
        return sampled.tolist(), logits.cpu()

    def logits(self, config: SmallConfig | None) -> Tensor:
        """All of them, by the product alone."""
        if config is None:
            return torch.nn.functional.linear(self.x, self.weight)
        from ostinato.kernels import triton_small_gemm

        out = self.x.new_empty((self.x.shape[0], self.num_vocab)).to(TRITON.device)
        triton_small_gemm.launch(config, self.x.to(TRITON.device), self.weight.to(TRITON.device), None, out)
        return out.cpu()

    @property
    def stored(self) -> list[bool]:
        return [slot in STORED for slot in self.slots]


def case(num_rows: int, num_vocab: int, size: int, dtype: torch.dtype, seed: int = 0) -> Case:
    """Inputs and weights are small multiples of a power of two, so that sums are exact in any order and many tie."""
    generator = torch.Generator().manual_seed(1000 * num_rows + num_vocab + seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).to(dtype)

    state = sampling_state(
        NUM_SLOTS,
        num_vocab,
        temperature=[0.0, 1.0, 0.7, 0.0, 0.0, 0.0, 2.5, 0.0, 0.9, 1.0],
        top_k=[0, 0, 3, 0, 0, 0, num_vocab, 5, 0, 0],
        top_p=[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.3, 1.0, 1.0],
        min_p=[0.0] * 8 + [0.1, 0.0],
        flags=[0, 0, 0, 1, 0, 4, 0, 0, 0, 2],
        min_length=[1000] * 10,
        num_tokens=torch.randint(1, 5000, (10,), generator=generator),
        repetition_penalty=[1.3] * 10,
        frequency_penalty=[0.25] * 10,
        output_counts=torch.randint(0, 3, (10, num_vocab), generator=generator),
        in_prompt=torch.rand(10, num_vocab, generator=generator) > 0.5,
    )
    state.bias_ids[:, :2] = torch.tensor([1, num_vocab - 1])
    state.bias_values[:, :2] = torch.tensor([3.0, 2.0])
    state.stop_ids[:, :2] = torch.tensor([2, 0])
    num_logprobs = torch.full((NUM_SLOTS,), -1, dtype=torch.int32)
    num_logprobs[[3, 4]] = torch.tensor([2, 0], dtype=torch.int32)
    order = torch.randperm(10, generator=generator).tolist()
    slots = [*order[:2], SCRATCH, *order[2:], *order][:num_rows]
    return Case(numbers(num_rows, size + 8)[:, :size], numbers(num_vocab, size) / 8, slots, state, num_logprobs)


def tiles(block_m: int = 16, block_n: int = 64, *, turned: bool = False, prefetch: int = 32) -> SmallConfig:
    return SmallConfig(block_m, block_n, 32, 1, num_warps=1, num_stages=2, turned=turned, prefetch=prefetch)


def assert_unread_rows_are_untouched(one: Case, buffer: Tensor, expected: Tensor) -> None:
    for r, stored in enumerate(one.stored):
        wanted = expected[r] if stored else torch.full_like(expected[r], 7.0)
        assert torch.equal(buffer[r], wanted), NAMES[one.slots[r]] if one.slots[r] != SCRATCH else "scratch"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_reference_is_the_separate_ops(dtype: torch.dtype) -> None:
    one = case(17, 300, 40, dtype)
    tokens, buffer = one.run("cpu", None)
    assert tokens == draw(TORCH, one.logits(None), one.slots, one.state, max_rows=20)[0]
    assert_unread_rows_are_untouched(one, buffer, one.logits(None))


def test_which_rows_store_their_logits() -> None:
    one = case(17, 300, 40, torch.float32)
    s = one.state
    asked = (s.temperature, s.top_p, s.min_p, s.top_k, s.flags, one.num_logprobs)
    for num_vocab in (300, 301):  # a top-k of 300 is a filter where there are more tokens
        found = stores_logits(num_vocab, torch.arange(NUM_SLOTS), *asked).tolist()
        assert {slot for slot, stored in enumerate(found) if stored} == STORED | ({6} if num_vocab > 300 else set())


# One row, a few and several blocks of rows; vocabularies of less than a tile, of whole tiles, with a tile that hangs
# over, and of more than a chunk of the sampler's.
SHAPES = [
    *((shape, turned, dtype) for shape in ((1, 37, 24), (5, 128, 64), (17, 301, 70)) for turned in (False, True)
      for dtype in DTYPES),
    ((17, 4500, 40), False, DTYPES[-1]),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "turned", "dtype"), SHAPES, ids=str)
def test_tokens_are_those_of_the_separate_ops(shape: tuple[int, int, int], turned: bool, dtype: torch.dtype) -> None:
    """Of the kernels for the same product, and of the reference, bit for bit; so are the logits that are stored."""
    require_triton()
    for seed in range(2 if shape[1] < 1000 else 1):
        one, config = case(*shape, dtype, seed), tiles(block_n=64 if shape[1] < 1000 else 256, turned=turned)
        tokens, buffer = one.run(TRITON.device, config)
        logits = one.logits(config)
        assert tokens == draw(TRITON, logits, one.slots, one.state, max_rows=shape[0] + 3)[0]
        assert_unread_rows_are_untouched(one, buffer, logits)
        if not GPU:  # whose logarithms, in the noise, are not the CPU's
            assert tokens == one.run("cpu", None)[0]
            assert torch.equal(logits, one.logits(None))
        assert all((token == -1) == (slot == SCRATCH) for token, slot in zip(tokens, one.slots, strict=False))
        assert tokens[shape[0] :] == [-1] * 3


@pytest.mark.parametrize(("block_m", "block_n"), [(16, 16), (32, 32), (64, 128)])
def test_other_tiles_draw_the_same(block_m: int, block_n: int) -> None:
    require_triton()
    one = case(17, 300, 40, torch.float16)
    expected, expected_buffer = one.run(TRITON.device, tiles())
    tokens, buffer = one.run(TRITON.device, tiles(block_m, block_n))
    assert tokens == expected and torch.equal(buffer, expected_buffer)


def test_no_rows() -> None:
    require_triton()
    one = case(0, 40, 24, torch.float32)
    assert one.run(TRITON.device, tiles())[0] == [-1] * 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_numbers_end_with_a_valid_id(temperature: float) -> None:
    """NaN counts as -inf; nothing finite gives 0; of infinite logits the first wins."""
    require_triton()
    inf, nan = math.inf, math.nan
    weight = torch.eye(4)[:, :3].repeat(20, 1)
    x = torch.tensor([[nan, nan, nan], [1.0, 2.0, -1.0], [3e38, 3e38, 1.0]])
    weight[:, 0] = torch.where(weight[:, 0] == 1, 1.0, 0.0)
    x[0], weight[7] = nan, torch.tensor([0.0, inf, 0.0])
    one = Case(x, weight, [0, 1, 2], sampling_state(4, 80, temperature=[temperature] * 3), torch.full((4,), -1))
    one = dataclasses.replace(one, num_logprobs=one.num_logprobs.int())
    tokens, _ = one.run(TRITON.device, tiles())
    assert tokens == draw(TRITON, one.logits(tiles()), [0, 1, 2], one.state, max_rows=6)[0]
    assert tokens[0] == 0 and tokens[1] == 7


def test_a_table_says_which_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in between take the config of the next number; shapes that are not listed have none."""
    assert all(head_config(*key[:2], key[2]) == SmallConfig(*fields) for key, fields in HEADS.items())
    assert head_config(300, 64, 8) is None
    fields: Any = dataclasses.astuple(tiles())
    for rows in HEAD_ROWS[1:3]:
        monkeypatch.setitem(small_configs.HEADS, (300, 64, rows), fields)
    assert [n for n in range(300) if head_config(300, 64, n) is not None] == list(range(5, 17))
    assert head_config(300, 64, 6) == tiles() and head_config(301, 64, 6) is None


def test_the_op_takes_its_config_from_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    require_triton()
    from ostinato.kernels import triton_small_head

    one = case(5, 128, 64, torch.float16)
    slots, sampled = torch.tensor(one.slots, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    tensors = (one.num_logprobs, one.x.new_zeros((5, 128)), torch.zeros(5, 128), sampled)
    args = [t.to(TRITON.device) for t in (one.x, one.weight, slots, *one.state, *tensors)]
    with pytest.raises(ValueError, match="no head kernel for 5 rows of 64 inputs and 128 tokens; use the separate ops"):
        triton_small_head.small_linear_sample(*args)
    monkeypatch.setitem(small_configs.HEADS, (128, 64, 8), dataclasses.astuple(tiles()))
    triton_small_head.small_linear_sample(*args)
    assert args[-1].tolist() == one.run(TRITON.device, tiles())[0][:5]
