"""The fixed buffers of a step: all of them have a name, so that memory tables, checks and graphs know them all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ostinato.kernels import reference_tiles
from ostinato.kernels.decode_tiles import tile_config
from ostinato.models.config import parse_config
from ostinato.runner.inputs import GatherShape, StepBuffers, TileShape

CONFIG = parse_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    for name in getattr(value, "__dict__", None) or getattr(value, "__slots__", ()):
        yield from tensors_in(getattr(value, name))


def make_buffers(
    gather: GatherShape | None = None,
    tiles: TileShape | None = None,
    dtype: torch.dtype = torch.float32,
    flash_width: int = 0,
) -> StepBuffers:
    return StepBuffers(
        CONFIG,
        max_rows=3,
        max_tokens=8,
        ring_depth=2,
        dtype=dtype,
        device=torch.device("cpu"),
        gather=gather,
        tiles=tiles,
        flash_width=flash_width,
    )


@pytest.mark.parametrize("gather", [None, GatherShape(width=4, block_size=16, dtype=torch.float32)])
@pytest.mark.parametrize("tiles", [None, TileShape(max_len=100, block_size=16, num_sms=4)])
def test_every_tensor_has_one_name(gather: GatherShape | None, tiles: TileShape | None) -> None:
    buffers = make_buffers(gather, tiles)
    named = dict(buffers.named())
    assert len(named) == len(list(buffers.named()))
    assert {id(tensor) for tensor in named.values()} == {id(tensor) for tensor in tensors_in(buffers)}
    assert ("work.gathered.pool" in named) == (gather is not None)


def test_without_tiles_there_is_no_room_for_them() -> None:
    buffers = make_buffers()
    assert buffers.tile_info.numel() == buffers.tile_cells.numel() == buffers.attention_partials.numel() == 0
    assert buffers.decode_tiles(tile_config(64, 2, 2), 2, 16) is None


@pytest.mark.parametrize("num_rows", [1, 3])
def test_rows_for_flash_attention(num_rows: int) -> None:
    """Of a key, and one of padding: at fixed addresses, contiguous."""
    buffers = make_buffers(flash_width=7)
    assert buffers.has_flash and not make_buffers().has_flash
    rows = buffers.flash_rows(num_rows)
    assert [tuple(part.shape) for part in rows] == [
        (num_rows + 1, 7),
        (num_rows + 2,),
        (num_rows + 1,),
        (num_rows + 1,),
    ]
    assert all(part.is_contiguous() and part.dtype == torch.int32 for part in rows)
    assert {part.data_ptr() for part in rows} <= {tensor.data_ptr() for _, tensor in buffers.named()}
    assert buffers.num_bytes() - make_buffers().num_bytes() == 4 * (4 * 7 + 5 + 4 + 4)


@pytest.mark.parametrize("cache_element_size", [1, 2])
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("max_len", [1, 64, 65, 130, 1000])
def test_the_list_has_room_for_all_rows_at_full_length(max_len: int, block_size: int, cache_element_size: int) -> None:
    """Whatever the cache's format. Listed by the specification, which raises where it would write behind the end."""
    buffers = make_buffers(tiles=TileShape(max_len, block_size, num_sms=4), dtype=torch.bfloat16)
    config = tile_config(CONFIG.head_dim, 2, cache_element_size)
    tiles = buffers.decode_tiles(config, CONFIG.num_kv_heads, block_size)
    assert tiles is not None and tiles.tile == config.tile
    assert tiles.num_programs == config.programs_per_sm * 4 // 2
    table = torch.arange(3 * -(-max_len // block_size), dtype=torch.int32).view(3, -1)
    seq_lens, edges = torch.full((3,), max_len, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    rows = (seq_lens, edges, table, edges[:3], 1, 3, block_size, block_size, config.tile)
    reference_tiles.plan_tiles(*rows, tiles.starts, tiles.info, tiles.cells)
    assert tiles.starts[3] == 3 * -(-max_len // config.tile)
