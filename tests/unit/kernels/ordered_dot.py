"""A `tl.dot` for Triton's interpreter that sums every output alike, as a matrix instruction does.

The interpreter multiplies with numpy, whose BLAS gives a row other bits at another place of a tile: 20 rows of a
product of two float32 [32, 32] change when the rows are reversed. That would hide what a kernel does by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch


@contextmanager
def ordered_dot() -> Iterator[None]:
    """Meanwhile the interpreter's dots add up K in order, in the accumulator's type. No effect on a GPU."""
    if torch.cuda.is_available():
        yield
        return
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        left, right, acc = (handle.data.astype(d.data.dtype) for handle in (a, b, d))
        for k in np.flatnonzero(left.any(0) | right.any(1)):  # products of zeros would add nothing
            acc += left[:, k, None] * right[None, k]
        return interpreter.TensorHandle(acc, d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield
