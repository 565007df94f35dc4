"""The other ops on CUDA against the CPU's: elementwise in every dtype, the step's integers and the sampler exactly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ostinato.kernels import ops
from ostinato.kernels.reference_sampling import stores_logits
from ostinato.kernels.small_configs import SmallConfig

from .op_cases import DTYPES, assert_close, normal

ROPE_SIZES = [(9, 3, 64, 64), (4, 4, 80, 80), (6, 2, 96, 48), (32, 8, 128, 128)]
SIZES = [(1, 48), (3, 64), (17, 576), (5, 1000), (2, 4096), (7, 5120)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(device: torch.device, dtype: torch.dtype) -> None:
    for num_tokens, size in SIZES:
        x, residual = normal(num_tokens, size, seed=1, dtype=dtype), normal(num_tokens, size, seed=2, dtype=dtype)
        weight = normal(size, seed=3, dtype=dtype)
        ours = ops.rms_norm(x.to(device), weight.to(device), 1e-5)
        assert_close(ours, ops.rms_norm(x.float(), weight.float(), 1e-5), dtype, 2.0, f"rms_norm {num_tokens}x{size}")

        on_device, expected = residual.to(device), residual.clone()
        ours = ops.add_rms_norm(x.to(device), on_device, weight.to(device), 1e-5)
        reference = ops.add_rms_norm(x, expected, weight, 1e-5)
        assert torch.equal(on_device.cpu(), expected), "the residual is rounded alike"
        assert_close(ours, reference.float(), dtype, 2.0, f"add_rms_norm {num_tokens}x{size}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(device: torch.device, dtype: torch.dtype) -> None:
    for num_tokens, size in SIZES:
        gate_up = 3 * normal(num_tokens, 2 * size, seed=4, dtype=dtype)
        ours = ops.silu_mul(gate_up.to(device))
        assert ours.shape == (num_tokens, size)
        assert_close(ours, ops.silu_mul(gate_up.float()), dtype, 2.0, f"{num_tokens}x{size}")


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope(device: torch.device, dtype: torch.dtype, with_norm: bool) -> None:
    """On strided views of a fused QKV buffer, whose values and other columns stay; partial rotation."""
    for num_heads, num_kv_heads, head_size, rotary in (
        (9, 3, 64, 64),
        (4, 4, 80, 80),
        (6, 2, 96, 48),
        (32, 8, 128, 128),
    ):
        if with_norm and rotary != head_size:
            continue
        width = (num_heads + 2 * num_kv_heads) * head_size
        qkv = normal(13, width, seed=5, dtype=dtype)
        positions = torch.randint(0, 300, (20,), generator=torch.Generator().manual_seed(6), dtype=torch.int32)
        angles = normal(300, rotary // 2, seed=7)
        cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
        weights = [normal(head_size, seed=seed, dtype=dtype) for seed in (8, 9)] if with_norm else [None, None]

        def run(buffer: Tensor, where: torch.device, kind: torch.dtype) -> None:
            q, k, _ = buffer.split([n * head_size for n in (num_heads, num_kv_heads, num_kv_heads)], -1)  # noqa: B023
            scales = [None if w is None else w.to(where, kind) for w in weights]  # noqa: B023
            ops.rope(
                q.view(13, num_heads, head_size), k.view(13, num_kv_heads, head_size),  # noqa: B023
                positions.to(where), cos_sin.to(where), scales[0], scales[1], 1e-6,  # noqa: B023
            )  # fmt: skip

        ours, expected = qkv.to(device), qkv.float()
        run(ours, device, dtype)
        run(expected, torch.device("cpu"), torch.float32)
        assert_close(ours, expected, dtype, 2.0, f"heads of {head_size}, {rotary} rotated")
        untouched = (num_heads + num_kv_heads) * head_size
        assert torch.equal(ours[:, untouched:].cpu(), qkv[:, untouched:])


# -- the step's integers -----------------------------------------------------------------------------------------------

S, M, W, RMAX, TMAX, VOCAB = 7, 100, 7, 6, 40, 130


def step_state(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    state = {
        "num_computed": ints(0, 60, S),
        "tokens": ints(0, VOCAB, S, M),
        "block_table": ints(1, 50, S, W),
        "output_counts": ints(0, 3, S, VOCAB),
        "step_count": ints(0, 9, 1),
        "ring": ints(0, VOCAB, 3, RMAX),
        "sampled": ints(0, VOCAB, RMAX),
    }
    state["num_tokens"] = state["num_computed"] + ints(1, 9, S)
    for name in ("num_computed", "num_tokens", "block_table", "tokens"):
        state[name][S - 1] = 0
    return state


@pytest.mark.parametrize("query_len", [0, 1, 2, 5])
def test_prepare_and_advance(device: torch.device, query_len: int) -> None:
    """Ragged and uniform, with padded rows at the end; every entry of every output, exactly."""
    for seed in range(5):
        state = step_state(seed)
        row_slot = torch.tensor([3, 0, 5, 1, S - 1, S - 1], dtype=torch.int32)
        lengths = [query_len] * 4 if query_len else [1, 7, 3, 12]
        ends = torch.tensor(lengths).cumsum(0).tolist()
        query_start = torch.tensor([0, *ends, ends[-1], ends[-1]], dtype=torch.int32)
        results = []
        for where in (torch.device("cpu"), device):
            moved = {name: tensor.clone().to(where) for name, tensor in state.items()}
            outs = [torch.full((size,), 99, dtype=torch.int32, device=where) for size in (TMAX, TMAX, TMAX, RMAX, RMAX)]
            slots, starts = row_slot.to(where), query_start.to(where)
            ops.prepare(
                slots, starts, moved["num_computed"], moved["num_tokens"], moved["tokens"], moved["block_table"],
                query_len, RMAX, 16, *outs,
            )  # fmt: skip
            ops.advance(
                slots, starts, moved["sampled"], query_len, RMAX, moved["tokens"], moved["num_tokens"],
                moved["num_computed"], moved["output_counts"], moved["step_count"], moved["ring"],
            )  # fmt: skip
            results.append([tensor.cpu() for tensor in (*outs, *(moved[name] for name in sorted(moved)))])
        for index, (ours, expected) in enumerate(zip(results[1], results[0], strict=True)):
            assert torch.equal(ours, expected), f"output {index} of seed {seed}"


def test_scatter(device: torch.device) -> None:
    """Only the first `count` patches, whatever comes after them."""
    generator = torch.Generator().manual_seed(0)
    for count in (1, 5, 1000, 5001):
        arena = torch.randint(-9, 9, (6000,), generator=generator, dtype=torch.int32)
        offsets = torch.randperm(6000, generator=generator)[: count + 3].int()
        patches = torch.stack((offsets, torch.arange(offsets.numel(), dtype=torch.int32)), -1)
        ours = arena.to(device)
        ops.scatter(ours, patches.to(device), count)
        ops.scatter(arena, patches, count)
        assert torch.equal(ours.cpu(), arena)


# -- the sampler -------------------------------------------------------------------------------------------------------


def sampling_state(num_slots: int, vocab: int, seed: int) -> ops.SamplingState:
    """Every kind of row: greedy, tempered, filtered, penalised, biased, banned, and all of it."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.arange(num_slots) % 8

    def floats(where: list[int], value: float, other: float) -> Tensor:
        return torch.where(torch.isin(kind, torch.tensor(where)), value, other).float()

    def words() -> Tensor:
        return torch.randint(-(2**31), 2**31, (num_slots,), generator=generator).int()

    num_tokens = torch.randint(5, 90, (num_slots,), generator=generator).int()
    counts = (torch.rand((num_slots, vocab), generator=generator) < 0.05).int() * 2
    state = ops.SamplingState(
        temperature=floats([0, 5], 0.0, 0.8),
        top_p=floats([2, 7], 0.7, 1.0),
        min_p=floats([3, 7], 0.05, 0.0),
        repetition_penalty=floats([4, 7], 1.3, 1.0),
        presence_penalty=floats([4, 5], 0.6, 0.0),
        frequency_penalty=floats([4, 7], -0.4, 0.0),
        top_k=floats([1, 7], 40, 0).int(),
        seed_lo=words(),
        seed_hi=words(),
        min_length=num_tokens + floats([6, 7], 3, -1).int(),
        num_tokens=num_tokens,
        stop_ids=torch.full((num_slots, 64), -1, dtype=torch.int32),
        bias_ids=torch.full((num_slots, 300), -1, dtype=torch.int32),
        bias_values=torch.zeros((num_slots, 300)),
        output_counts=counts,
        in_prompt=torch.rand((num_slots, vocab), generator=generator) < 0.02,
        allowed=torch.randint(-(2**31), 2**31, (num_slots, -(-vocab // 32)), generator=generator).int(),
        flags=(floats([4, 5, 7], 1, 0) + floats([6, 7], 2, 0) + floats([6, 7], 4, 0) + floats([3, 7], 8, 0)).int(),
    )
    state.stop_ids[:, :5] = torch.randint(0, vocab, (num_slots, 5), generator=generator).int()
    for slot in range(num_slots):
        state.bias_ids[slot, :40] = torch.randperm(vocab, generator=generator)[:40].int()
    state.bias_values[:, :40] = 3 * torch.randn((num_slots, 40), generator=generator)
    return state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [130, 1000, 49152, 151936])
def test_sampling_equals_the_cpus(device: torch.device, dtype: torch.dtype, vocab: int) -> None:
    """The same tokens from the same seeds; a draw in a hundred may be a tie that rounding decides."""
    num_slots, num_rows = 65, 40
    state = sampling_state(num_slots, vocab, seed=vocab)
    on_device = ops.SamplingState(*(tensor.to(device) for tensor in state))
    drawn = same = 0
    for seed in range(3):
        logits = 3 * normal(num_rows, vocab, seed=seed, dtype=dtype)
        row_slot = torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed))[:num_rows].int()
        row_slot[-2:] = num_slots - 1
        sampled = [torch.full((num_rows + 3,), 7, dtype=torch.int32, device=where) for where in ("cpu", device)]
        ops.sample(logits, row_slot, state, torch.empty(num_rows, vocab), sampled[0])
        ops.sample(
            logits.to(device), row_slot.to(device), on_device, torch.empty(num_rows, vocab, device=device), sampled[1]
        )
        expected, ours = sampled[0], sampled[1].cpu()
        pads = expected < 0
        assert torch.equal(pads, ours < 0)
        assert bool(pads[row_slot.eq(num_slots - 1).nonzero().flatten()].all())
        greedy = state.temperature[row_slot.long()] == 0
        plain = greedy & (state.flags[row_slot.long()] == 0)
        assert torch.equal(expected[:num_rows][plain], ours[:num_rows][plain])
        drawn += int((~pads).sum())
        same += int((expected == ours)[~pads].sum())
    assert same >= drawn - max(1, drawn // 100), f"{drawn - same} of {drawn} draws differ"


HEAD_TILES = [
    SmallConfig(16, 64, 64, 1, num_warps=4, num_stages=3, turned=True, prefetch=128),
    SmallConfig(64, 128, 64, 1, num_warps=8, num_stages=3, turned=False, prefetch=128),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", HEAD_TILES, ids=str)
@pytest.mark.parametrize("vocab", [130, 1000, 49152, 151936])
def test_heads_choose_the_samplers_tokens(
    device: torch.device, dtype: torch.dtype, config: SmallConfig, vocab: int
) -> None:
    """Every one, whatever its row asks for, since logits and values have the same bits; and nothing else is written."""
    from ostinato.kernels import triton_small_gemm
    from ostinato.kernels.triton_small_head import launch_head

    num_slots, num_rows, size = 65, 40, 256
    on_host = sampling_state(num_slots, vocab, seed=vocab)
    num_logprobs = torch.where(torch.arange(num_slots) % 5 == 0, 3, -1).int()
    state = ops.SamplingState(*(tensor.to(device) for tensor in on_host))
    weight = normal(vocab, size, seed=4, dtype=dtype).to(device) / 4
    for seed in range(3):
        x = normal(num_rows, size, seed=seed, dtype=dtype).to(device)
        row_slot = torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed))[:num_rows].int()
        row_slot[-2:] = num_slots - 1
        logits = torch.full((num_rows, vocab), float("nan"), dtype=dtype, device=device)
        expected_logits, adjusted = logits.clone(), torch.empty(num_rows, vocab, device=device)
        tokens, expected = (torch.full((num_rows + 3,), 7, dtype=torch.int32, device=device) for _ in range(2))
        slots = row_slot.to(device)
        triton_small_gemm.launch(config, x, weight, None, expected_logits)
        ops.sample(expected_logits, slots, state, adjusted, expected)
        launch_head(config, x, weight, slots, state, num_logprobs.to(device), logits, adjusted, tokens)
        assert torch.equal(tokens, expected)
        asked = (on_host.temperature, on_host.top_p, on_host.min_p, on_host.top_k, on_host.flags, num_logprobs)
        stored = stores_logits(vocab, row_slot, *asked).to(device)
        assert bool(stored.any()) and not bool(stored.all())
        assert torch.equal(logits[stored], expected_logits[stored])
        assert bool(logits[~stored].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [130, 49152])
def test_logprobs(device: torch.device, dtype: torch.dtype, vocab: int) -> None:
    """0, 1, 5 and 20 alternatives, rows that want none, with many equal logits (16-bit types round them so)."""
    num_rows = 7
    wanted = torch.tensor([-1, 0, 1, 5, 20, 3, 20, -1, -1], dtype=torch.int32)
    logits = normal(num_rows, vocab, seed=5, dtype=dtype)
    row_slot = torch.tensor([4, 0, 6, 1, 3, 2, 8], dtype=torch.int32)
    sampled = torch.randint(0, vocab, (num_rows,), generator=torch.Generator().manual_seed(1)).int()
    outs = []
    for where in (torch.device("cpu"), device):
        values = torch.full((num_rows, 22), 5.0, device=where)
        ids = torch.full((num_rows, 22), 5, dtype=torch.int32, device=where)
        ops.logprobs(logits.to(where), row_slot.to(where), wanted.to(where), sampled.to(where), values, ids)
        outs.append((values.cpu(), ids.cpu()))
    assert torch.equal(outs[1][1], outs[0][1])
    assert torch.allclose(outs[1][0], outs[0][0], atol=1e-4, rtol=1e-5)


def test_logits_of_nan_and_infinity(device: torch.device) -> None:
    """As on the CPU: NaN counts as -inf, nothing finite gives 0."""
    logits = normal(5, 1000, seed=1)
    logits[0, :500] = float("nan")
    logits[1] = float("-inf")
    logits[2] = float("nan")
    logits[3, 7] = float("inf")
    state = sampling_state(6, 1000, seed=2)
    state = state._replace(temperature=torch.zeros(6), flags=torch.zeros(6, dtype=torch.int32))
    results = []
    for where in (torch.device("cpu"), device):
        sampled = torch.zeros(5, dtype=torch.int32, device=where)
        moved = ops.SamplingState(*(tensor.to(where) for tensor in state))
        ops.sample(logits.to(where), torch.arange(5, dtype=torch.int32, device=where), moved,
                   torch.empty(5, 1000, device=where), sampled)  # fmt: skip
        results.append(sampled.cpu())
    assert torch.equal(results[0], results[1])
