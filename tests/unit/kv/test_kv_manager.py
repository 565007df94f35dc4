from __future__ import annotations

import pytest

from ostinato.errors import ConfigError, OstinatoError
from ostinato.kv.manager import KVManager, PrefixHit
from ostinato.request import Request, SamplingParams


def request_of(request_id: str, tokens: list[int], **params: int) -> Request:
    return Request(request_id, tuple(tokens), SamplingParams(**params))  # type: ignore[arg-type]


def run(manager: KVManager, request: Request) -> PrefixHit:
    """Admit a request and have all its known tokens computed and collected."""
    hit = manager.match(request)
    assert manager.allocate(request, hit, len(request.tokens)) is not None
    manager.register_full_blocks(request, len(request.tokens))
    return hit


@pytest.mark.parametrize(("num_tokens", "num_hit"), [(4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (30, 8)])
def test_a_hit_is_full_blocks_and_never_the_last_token(num_tokens: int, num_hit: int) -> None:
    manager = KVManager(32, 4)
    run(manager, request_of("first", list(range(11))))
    hit = manager.match(request_of("second", list(range(num_tokens))))
    assert hit == PrefixHit(tuple(manager.table("first")[: num_hit // 4]), num_hit)


def test_sharing_takes_no_blocks_and_ends_with_the_last_user() -> None:
    manager = KVManager(8, 4)
    for name in ("a", "b", "c"):
        hit = run(manager, request_of(name, [1, 2, 3, 4, 5, 6, 7, 8, 9]))
        assert hit.num_tokens == (0 if name == "a" else 8)
    assert manager.num_free == 7 - 2 - 3
    assert manager.prefix_query_tokens == 27 and manager.prefix_hit_tokens == 16
    for name in ("b", "a", "c"):
        manager.check_integrity()
        manager.free(name)
    assert manager.num_free == 7
    assert manager.num_cached == 2


def test_a_cached_free_block_counts_as_taken() -> None:
    manager = KVManager(4, 4)
    run(manager, request_of("a", list(range(9))))
    manager.free("a")
    request = request_of("b", list(range(9)))
    hit = manager.match(request)
    assert hit.num_tokens == 8
    assert manager.num_taken(hit, 9) == 3 == manager.num_free
    assert manager.allocate(request, hit, 9) is not None
    assert manager.num_free == 0


def test_extend_appends_or_does_nothing() -> None:
    manager = KVManager(6, 4)
    request = request_of("a", [1, 2, 3])
    table = manager.allocate(request, PrefixHit(), 3)
    assert table == list(manager.table("a")) and len(table) == 1
    assert manager.extend(request, 4) == []
    new = manager.extend(request, 12)
    assert new is not None and len(new) == 2
    assert manager.table("a") == table + new
    assert manager.num_missing(request, 21) == 3
    assert manager.extend(request, 21) is None
    assert manager.table("a") == table + new and manager.num_free == 2


def test_short_of_blocks_a_request_gets_none() -> None:
    manager = KVManager(4, 4)
    request = request_of("a", list(range(13)))
    assert manager.allocate(request, PrefixHit(), 13) is None
    assert manager.table("a") == () and manager.num_free == 3


def test_tails_are_reused_before_heads() -> None:
    manager = KVManager(4, 4)
    run(manager, request_of("a", list(range(12))))
    manager.free("a")
    request = request_of("b", [99] * 5)
    assert manager.allocate(request, PrefixHit(), 5) is not None
    assert manager.match(request_of("c", list(range(12)))).num_tokens == 4


def test_only_written_blocks_are_found() -> None:
    manager = KVManager(16, 4)
    request = request_of("a", list(range(12)))
    manager.allocate(request, PrefixHit(), 12)
    for num_tokens, num_hit in ((3, 0), (4, 4), (7, 4), (11, 8), (12, 12)):
        manager.register_full_blocks(request, num_tokens)
        assert manager.match(request_of("b", list(range(20)))).num_tokens == num_hit


def test_outputs_are_cached_like_prompts() -> None:
    manager = KVManager(16, 4)
    request = request_of("a", [1, 2, 3])
    manager.allocate(request, PrefixHit(), 3)
    request.tokens += [4, 5, 6]
    manager.extend(request, 5)
    manager.register_full_blocks(request, 5)
    manager.free("a")
    assert manager.match(request_of("b", [1, 2, 3, 4, 5])).num_tokens == 4


def test_prompt_logprobs_and_the_switch_bypass_the_cache() -> None:
    manager = KVManager(16, 4)
    run(manager, request_of("a", list(range(9))))
    assert manager.match(request_of("b", list(range(9)), prompt_logprobs=0)) == PrefixHit()
    off = KVManager(16, 4, enable_prefix_caching=False)
    run(off, request_of("a", list(range(9))))
    assert off.match(request_of("b", list(range(9)))) == PrefixHit()
    assert off.num_cached == 0


def test_a_detached_table_stays_held() -> None:
    manager = KVManager(6, 4)
    run(manager, request_of("a", list(range(9))))
    table = manager.detach("a")
    assert manager.num_free == 2
    manager.check_integrity([table])
    with pytest.raises(OstinatoError):
        manager.check_integrity()
    assert manager.num_freed_by([table]) == 3
    manager.release(table)
    assert manager.num_free == 5


def test_forgotten_contents_do_not_come_back_through_a_live_table() -> None:
    manager = KVManager(16, 4)
    request = request_of("a", list(range(12)))
    manager.allocate(request, PrefixHit(), 12)
    manager.register_full_blocks(request, 8)
    manager.forget_contents()
    manager.register_full_blocks(request, 12)
    assert manager.num_cached == 0


def test_refuses_a_block_without_tokens() -> None:
    with pytest.raises(ConfigError, match="block_size=0"):
        KVManager(8, 0)
