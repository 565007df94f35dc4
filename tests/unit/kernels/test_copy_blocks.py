"""Both implementations of `copy_blocks`, and the wait for what another thread copies."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from attention_case import DEVICE
from torch import Tensor

from ostinato.errors import OstinatoError
from ostinato.kernels import ops, reference_blocks


def triton_copy_blocks(*args: Tensor | int) -> None:
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if DEVICE == "cpu" and not triton.knobs.runtime.interpret:
        pytest.skip("triton was imported without its interpreter and there is no GPU")
    from ostinato.kernels.triton_blocks import copy_blocks

    copy_blocks(*args)  # type: ignore[arg-type]


@pytest.fixture(params=[(reference_blocks.copy_blocks, "cpu"), (triton_copy_blocks, DEVICE)], ids=["torch", "triton"])
def implementation(request: pytest.FixtureRequest) -> tuple[Callable[..., None], str]:
    return request.param


@pytest.mark.parametrize(("first_layer", "num_layers"), [(0, 3), (0, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("num_bytes", [8, 136, 2 * 16 * 3 * 80 * 4])
def test_named_layers_of_named_blocks_and_nothing_else(
    implementation: tuple[Callable[..., None], str], num_bytes: int, first_layer: int, num_layers: int
) -> None:
    copy_blocks, device = implementation
    generator = torch.Generator().manual_seed(num_bytes)
    source, target = (
        torch.randint(0, 256, (count, 3, num_bytes), dtype=torch.uint8, generator=generator).to(device)
        for count in (6, 25)
    )
    froms, tos = [5, 0, 2, 2], [24, 7, 1, 11]
    expected = target.clone()
    for one, other in zip(froms, tos, strict=True):
        expected[other, first_layer : first_layer + num_layers] = source[one, first_layer : first_layer + num_layers]
    ids = [torch.tensor(values, dtype=torch.int32, device=device) for values in (froms, tos)]
    copy_blocks(source, target, *ids, first_layer, num_layers)
    assert torch.equal(target, expected)


def test_waiting_ends_when_the_layer_is_there_or_will_not_be() -> None:
    pending = torch.ones(3, dtype=torch.int32)
    arrived: list[int] = []

    def wait(layer: int) -> None:
        ops.wait_loaded(pending, layer)
        arrived.append(layer)

    threads = [threading.Thread(target=wait, args=(layer,)) for layer in (0, 1)]
    for thread in threads:
        thread.start()
    pending[1] = 0
    threads[1].join(60)
    assert arrived == [1]
    pending[0] = 0
    threads[0].join(60)
    assert arrived == [1, 0]
    pending[2] = -1
    with pytest.raises(OstinatoError, match="layer 2 could not be loaded"):
        ops.wait_loaded(pending, 2)
