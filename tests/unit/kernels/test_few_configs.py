"""Whatever the shape, a config is one that the kernels accept."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.kernels.few_configs import MAX_FEW_ROWS, FewConfig, Kind, few_config, max_few_rows

KINDS = get_args(Kind)


def is_power_of_2(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


@given(
    kind=st.sampled_from(KINDS),
    num_out=st.integers(1, 200_000),
    size=st.integers(1, 32_768),
    num_rows=st.integers(1, MAX_FEW_ROWS),
)
def test_every_shape_has_a_config_that_covers_it(kind: Kind, num_out: int, size: int, num_rows: int) -> None:
    config = few_config(kind, num_out, size, num_rows)
    assert config == few_config(kind, num_out, size, num_rows)
    assert all(is_power_of_2(n) for n in (config.block_n, config.block_k, config.num_warps))
    assert config.num_warps <= 16 and config.programs_per_sm >= 1
    assert config.dot or num_rows <= 4
    if config.dot:
        assert config.block_n >= 8 and config.block_k >= 16 * config.num_warps
    elif kind != "residual":
        assert config.block_k >= size
    assert 1 <= config.num_programs(num_out, 132) <= max(132 * config.programs_per_sm, 1)


def test_the_grid_is_one_wave_at_most() -> None:
    config = FewConfig(4, 2048, 8, 3, 1)
    assert config.num_programs(128_256, 132) == 3 * 132
    assert config.num_programs(2_001, 132) == 396
    assert config.num_programs(9, 132) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_three_rows_take_the_config_of_four(kind: Kind) -> None:
    assert few_config(kind, 3072, 2048, 3) == few_config(kind, 3072, 2048, 4)


def test_large_models_leave_more_than_two_rows_to_the_separate_ops() -> None:
    assert [max_few_rows(hidden_size) for hidden_size in (576, 2048, 4096, 8192)] == [4, 4, 2, 2]
    assert max(map(max_few_rows, range(0, 9000, 100))) == MAX_FEW_ROWS


def test_configs_are_pure_python() -> None:
    program = "import sys; import ostinato.kernels.few_configs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
