"""Engines that are killed while they write. `python -m tests.e2e.test_disk_crash 200` kills so many."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

from .connecting import MAX_BYTES, start, write_blocks
from .models import TinyModel, build_tiny, prompts_of

PROMPTS = prompts_of((70, 90, 80, 75, 100, 66, 50), 160, seed=92)
ROUNDS = 10


def kill_engines(model: TinyModel, folder: Path, rounds: int, seed: int) -> tuple[int, int, int]:
    """Each finds what those before it have left. Returns answers, hit tokens, and how often a half-made file was left.
    A wrong token fails."""
    chance = random.Random(seed)
    expected = [model.greedy(prompt, 3) for prompt in PROMPTS]
    num_answers = num_hits = num_leftovers = 0
    for number in range(rounds):
        engine, pipe = start(write_blocks, model.path, folder, PROMPTS, seed + number)
        hits, end = 0, None
        while end is None or time.monotonic() < end:
            if pipe.poll(60 if end is None else max(0.0, end - time.monotonic())):
                index, tokens, hits = pipe.recv()
                assert tokens == expected[index], f"engine {number}, prompt {index}"
                num_answers += 1
                end = end or time.monotonic() + chance.uniform(0, 0.3)
            else:
                assert end is not None, "the engine did not come up"
        engine.kill()
        engine.join()
        while pipe.poll():
            try:
                index, tokens, hits = pipe.recv()
            except (EOFError, OSError):
                break
            assert tokens == expected[index], f"engine {number}, prompt {index}"
            num_answers += 1
        pipe.close()
        num_hits += hits
        num_leftovers += bool(list(folder.rglob("*.tmp")))
        assert sum(path.stat().st_size for path in folder.rglob("*.safetensors")) <= MAX_BYTES
    return num_answers, num_hits, num_leftovers


def test_engines_killed_at_random_moments(tmp_path: Path) -> None:
    model = build_tiny(tmp_path / "model", "Qwen3", num_hidden_layers=3)
    answers, hits, _ = kill_engines(model, tmp_path / "blocks", ROUNDS, seed=1)
    assert answers >= ROUNDS
    assert hits > 0


def main() -> None:
    begun, rounds = time.monotonic(), int(sys.argv[1])
    with tempfile.TemporaryDirectory() as scratch:
        model = build_tiny(Path(scratch) / "model", "Qwen3", num_hidden_layers=3)
        answers, hits, left = kill_engines(model, Path(scratch) / "blocks", rounds, seed=random.randrange(10**6))
    print(f"{rounds} engines killed, {left} left a file half made; {answers} answers, all right, {hits} tokens of KV")
    print(f"came from files; {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
