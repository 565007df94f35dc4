from __future__ import annotations

import pytest
from fake_runner import make_request

from ostinato.request import FinishReason
from ostinato.scheduler.stop import check_stop, max_length


@pytest.mark.parametrize(
    ("outputs", "params", "reason"),
    [
        ([], {}, None),
        ([5], {}, None),
        ([5, 0], {}, FinishReason.STOP),
        ([5, 0], {"ignore_eos": True}, None),
        ([5, 9], {"ignore_eos": True, "stop_token_ids": [9]}, FinishReason.STOP),
        ([5, 0], {"min_tokens": 3}, None),
        ([5, 5, 0], {"min_tokens": 3}, FinishReason.STOP),
        ([0, 5], {}, None),  # only the newest token counts
        ([5, 5, 5, 5], {"max_tokens": 4}, FinishReason.LENGTH),
        ([5, 5, 5, 0], {"max_tokens": 4}, FinishReason.STOP),
        ([5, 5, 5, 0], {"max_tokens": 4, "min_tokens": 4}, FinishReason.STOP),
        ([5] * 6, {"max_tokens": None}, None),
        ([5] * 7, {"max_tokens": None}, FinishReason.LENGTH),
        ([5] * 7, {"max_tokens": 100, "min_tokens": 50}, FinishReason.LENGTH),
    ],
)
def test_why_a_request_ends(outputs: list[int], params: dict[str, object], reason: FinishReason | None) -> None:
    request = make_request("r", [0, 0, 0], **params)
    request.tokens += outputs
    assert check_stop(request, max_model_len=10) is reason


@pytest.mark.parametrize(("max_tokens", "length"), [(1, 4), (6, 9), (7, 10), (8, 10), (None, 10)])
def test_max_length(max_tokens: int | None, length: int) -> None:
    assert max_length(make_request("r", [1, 2, 3], max_tokens=max_tokens), 10) == length
