"""Whatever the shape, a config is one that the kernels accept, or there is none."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ostinato.kernels.small_configs import MAX_SMALL_ROWS, SMALL_ROWS, Kind, SmallConfig, small_config
from ostinato.kernels.small_tuned import TUNED

KINDS = get_args(Kind)
MAX_SHARED_BYTES = 227 * 1024


def is_power_of_2(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def assert_accepted(config: SmallConfig, kind: Kind, size: int) -> None:
    assert all(is_power_of_2(n) for n in (config.block_m, config.block_n, config.block_k, config.num_warps))
    assert min(config.block_m, config.block_n, config.block_k) >= 16
    assert config.prefetch == 0 or is_power_of_2(config.prefetch)
    assert kind == "parts" or config.num_parts == 1
    part_size = config.part_size(size, config.num_parts)
    assert part_size % config.block_k == 0 and part_size * config.num_parts >= size
    assert part_size * (config.num_parts - 1) < size, "a part without inputs"
    # Hopper multiplies what is in shared memory from 64 rows of the left operand on.
    assert not config.turned or config.block_n >= 64
    tiles = config.block_m + config.block_n * (2 if kind == "gated" else 1)
    assert config.num_stages * tiles * config.block_k * 2 <= MAX_SHARED_BYTES


@given(
    kind=st.sampled_from(KINDS),
    num_out=st.integers(1, 12_500).map(lambda n: 16 * n),
    size=st.integers(1, 512).map(lambda n: 64 * n),
    num_rows=st.integers(1, 64),
)
@example(kind="parts", num_out=1024, size=3648, num_rows=16)  # 29 steps: with 7 parts of 5 the last would be empty
def test_shapes_of_whole_tiles_have_a_config_or_are_narrow(kind: Kind, num_out: int, size: int, num_rows: int) -> None:
    config = small_config(kind, num_out, size, num_rows)
    if config is None:
        in_table = any((kind, num_out, size, rows) in TUNED for rows in SMALL_ROWS)
        assert in_table or (kind == "plain" and num_out < 4096 and num_rows <= 16)
    else:
        assert_accepted(config, kind, size)


@pytest.mark.parametrize("key", sorted(TUNED), ids=str)
def test_the_table_is_taken_as_it_stands(key: tuple[Kind, int, int, int]) -> None:
    fields, config = TUNED[key], small_config(*key)
    assert config == (None if fields is None else SmallConfig(*fields))
    if config is not None:
        assert_accepted(config, key[0], key[2])


@given(kind=st.sampled_from(KINDS), num_out=st.integers(1, 200_000), size=st.integers(1, 32_768))
def test_many_rows_and_odd_shapes_are_left_to_cublas(kind: Kind, num_out: int, size: int) -> None:
    assert small_config(kind, num_out, size, MAX_SMALL_ROWS + 1) is None
    assert small_config(kind, num_out, size, 0) is None
    if (kind, num_out, size, 128) not in TUNED:
        assert small_config(kind, num_out, size, 65) is None
    if num_out % 16 or size % 64:
        assert small_config(kind, num_out, size, 8) is None


@pytest.mark.parametrize(("num_rows", "bucket"), [(1, 8), (5, 8), (9, 16), (33, 64), (65, 128), (129, 256)])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_between_take_the_config_of_the_next_bucket(kind: Kind, num_rows: int, bucket: int) -> None:
    for num_out, size in ((1024, 3072), (4096, 1024), (3072, 1024), (2560, 9728)):
        assert small_config(kind, num_out, size, num_rows) == small_config(kind, num_out, size, bucket)


def test_the_rule_agrees_with_the_table_where_that_agrees_with_itself() -> None:
    """Shapes beside measured ones, of models between them."""
    assert small_config("parts", 2048, 8192 + 64, 32) == SmallConfig(*(32, 64, 128, 4, 4, 6, True, 512))
    assert small_config("parts", 2048, 8192 + 64, 64) == SmallConfig(*(64, 32, 128, 2, 4, 6, False, 512))
    assert small_config("plain", 6144, 4096 + 64, 8) == SmallConfig(*(16, 64, 128, 1, 4, 6, True, 512))
    assert small_config("plain", 6144, 4096 + 64, 64) == SmallConfig(*(64, 64, 128, 1, 4, 6, False, 512))
    assert small_config("plain", 128256, 3072, 16) == SmallConfig(*(16, 64, 128, 1, 4, 3, True, 512))
    assert small_config("gated", 14336, 4096 + 64, 32) == SmallConfig(*(32, 64, 64, 1, 4, 5, True, 512))


def test_configs_are_pure_python() -> None:
    program = "import sys; import ostinato.kernels.small_configs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
