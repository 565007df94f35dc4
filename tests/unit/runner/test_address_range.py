from __future__ import annotations

import mmap

import pytest
import torch

from ostinato.errors import CapacityError
from ostinato.kernels.kv_formats import kv_format
from ostinato.models.config import parse_config
from ostinato.runner.address_range import HostRange
from ostinato.runner.memory import KVPool, WeightMemory

CONFIG = parse_config(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 33,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
)
CPU = torch.device("cpu")


def test_memory_that_went_has_lost_its_contents_and_what_stays_has_not() -> None:
    page = mmap.PAGESIZE
    addresses = HostRange(4 * page)
    addresses.resize(4 * page)
    tensor = addresses.tensor(torch.uint8)
    tensor.fill_(7)
    where = tensor.data_ptr()
    addresses.resize(page + 5)
    addresses.resize(4 * page)
    again = addresses.tensor(torch.uint8)
    assert again.data_ptr() == where
    assert again[: page + 5].eq(7).all()
    assert again[2 * page :].eq(0).all()
    addresses.close()
    addresses.close()


def test_a_range_does_not_grow() -> None:
    addresses = HostRange(100)
    with pytest.raises(CapacityError, match="101 bytes do not fit the reserved range of 100"):
        addresses.resize(101)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_parameter_is_its_own_and_aligned(dtype: torch.dtype) -> None:
    memory = WeightMemory(CONFIG, dtype, CPU)
    for index, (_, tensor) in enumerate(memory.weights.named()):
        tensor.fill_(index)
    for index, (name, tensor) in enumerate(memory.weights.named()):
        assert tensor.eq(index).all(), name
        assert tensor.data_ptr() % 256 == 0, name
        assert tensor.is_contiguous(), name


@pytest.mark.parametrize("keep", [True, False])
def test_weights_go_and_come_back_to_the_same_place(keep: bool) -> None:
    memory = WeightMemory(CONFIG, torch.float32, CPU)
    for _, tensor in memory.weights.named():
        tensor.normal_()
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in memory.weights.named()}
    memory.give_back(keep=keep)
    assert not memory.is_mapped
    assert all(tensor.eq(0).all() for _, tensor in memory.weights.named()), "the memory did not go"
    assert memory.take_back() is keep
    assert memory.is_mapped
    for name, tensor in memory.weights.named():
        address, values = before[name]
        assert tensor.data_ptr() == address
        assert torch.equal(tensor, values) is keep


def test_blocks_go_and_come_back() -> None:
    pool = KVPool(CONFIG, 16, kv_format("auto", torch.float32), CPU, most=20)
    pool.resize(20)
    pool.storage.pool.fill_(3.0)
    pool.give_back()
    assert pool.mapped_bytes == 0
    pool.take_back()
    assert pool.num_blocks == 20
    assert pool.mapped_bytes == 20 * pool.storage.block_bytes
    assert pool.storage.pool.eq(0).all()
