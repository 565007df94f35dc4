"""Every graph mode under NVIDIA's compute-sanitizer, on a tiny model of random weights made on the fly.

    python benchmarks/sanitize.py --out sanitize.json
    python benchmarks/sanitize.py --tools racecheck --modes FULL

Each tool runs once, over one process that goes through the modes: prompts that are cut into steps, decode steps of one
to four rows, all kinds of sampling. What the tools can see: memcheck accesses outside every allocation (torch's pool is
one allocation to it), initcheck reads of global memory that nothing wrote, racecheck hazards in shared memory.
initcheck does not see what some of cuBLAS's kernels write, so under it products of matrices go to zeroed memory.
memcheck also reports API calls that fail. Libraries ask the driver for entry points that this one lacks, and such a
call of cuGetProcAddress is no finding: it is listed as ignored. Every other failed call counts. Exit code 0: every tool
ran to its end and found nothing. 1: findings, a failed run or one that took too long. 2: it could not be tried.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SRC = Path(__file__).resolve().parents[1] / "src"
TOOLS = ("memcheck", "initcheck", "racecheck")
MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
SANITIZER = "compute-sanitizer"
MARK = "SANITIZE MODE "
"""Begins the line that the inner program prints before each mode, and the one at its end."""
END = "DONE"

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

_LINE = re.compile(r"^=========(?: (.*))?$")
_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error")
_HAZARDS = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)")
_AT = re.compile(r"^\s+at (.+?)(?:\+0x[0-9a-f]+)?(?: in .*)?$")
_PROBE = re.compile(
    r"^Program hit (?:CUDA_ERROR_INVALID_VALUE \(error 1\)|CUDA_ERROR_NOT_FOUND \(error 500\)) due to .*"
    r" on CUDA API call to cuGetProcAddress(?:_v2)?\.$"
)
"""By these two errors alone: the call may also hand on one that a launch before it left behind. The tool's own option,
--ignore-getprocaddress-notfound, covers the second only, and --report-api-errors no would hide every failed call."""
_NO_REPORT = ("COMPUTE-SANITIZER", "Saved host backtrace", "Host Frame", "Device Frame", "LEAK SUMMARY")


# -- the outer program: runs the tools, reads what they say ------------------------------------------------------------


def parse(text: str) -> dict[str, Any]:
    """What a tool's output says, the program's own lines in between included.

    `errors` and `warnings` are the tool's own counts, None where it gave no summary. `findings` are the first lines of
    its reports, equal ones together with their number, with the kernel and the mode whose mark came last (the tool
    reports when the host waits, so near a change of modes it may belong to the one before). `ignored` are those of
    them that say nothing about memory; `errors` counts them too. `finished`: the program came to its end.
    """
    errors: int | None = None
    warnings = 0
    mode, finished = None, False
    findings: dict[tuple[str, str | None, str | None], int] = {}
    opened: str | None = None  # a report whose kernel has not been named yet
    for raw in text.splitlines():
        line = raw.rstrip()
        if line.startswith(MARK):
            mode = line.removeprefix(MARK)
            finished = mode == END
            continue
        if (found := _LINE.match(line)) is None:
            continue
        said = found[1] or ""
        if (summary := _HAZARDS.search(said)) is not None:
            errors, warnings = int(summary[2]), int(summary[3])
        elif (summary := _ERRORS.search(said)) is not None:
            errors = int(summary[1])
        elif opened is not None and (place := _AT.match(said)) is not None:
            _count(findings, opened, place[1], mode)
            opened = None
        elif said and not said.startswith((" ", *_NO_REPORT)):
            if opened is not None:
                _count(findings, opened, None, mode)
            opened = said
    if opened is not None:
        _count(findings, opened, None, mode)
    reports = [
        {"message": message, "kernel": kernel, "mode": where, "count": count}
        for (message, kernel, where), count in findings.items()
    ]
    return {
        "errors": errors,
        "warnings": warnings,
        "finished": finished,
        "findings": [report for report in reports if not _is_probe(report)],
        "ignored": [report for report in reports if _is_probe(report)],
    }


def _is_probe(report: dict[str, Any]) -> bool:
    return _PROBE.match(report["message"]) is not None


def _count(
    findings: dict[tuple[str, str | None, str | None], int], message: str, kernel: str | None, mode: str | None
) -> None:
    """Addresses, threads and blocks differ from one report to the next, what they say does not."""
    told = re.sub(r"0x[0-9a-f]+", "0x...", re.sub(r"\(\d+,\d+,\d+\)", "(...)", message))
    index = (told, kernel, None if mode == END else mode)
    findings[index] = findings.get(index, 0) + 1


def verdict(result: dict[str, Any]) -> str:
    """`clean`, `findings`, `timed out` or `failed`. Errors that the tool counted and did not show are findings."""
    if result["timed_out"]:
        return "timed out"
    if result["findings"] or result["warnings"] or (result["errors"] or 0) > num_ignored(result):
        return "findings"
    return "clean" if result["errors"] is not None and result["finished"] and not result["exit_code"] else "failed"


def num_ignored(result: dict[str, Any]) -> int:
    return sum(report["count"] for report in result["ignored"])


def run_tool(sanitizer: str, tool: str, inner: Sequence[str], timeout_s: float) -> tuple[dict[str, Any], str]:
    """One tool over the inner program: the result, and all that was printed."""
    command = [sanitizer, "--tool", tool, "--target-processes", "application-only", "--print-limit", "200", *inner]
    began, timed_out = time.perf_counter(), False
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        text, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        timed_out = True
        process.kill()
        text, _ = process.communicate()
    seconds = time.perf_counter() - began
    result = {"tool": tool, "seconds": round(seconds, 1), "exit_code": process.returncode, "timed_out": timed_out}
    result |= parse(text)
    return {"verdict": verdict(result)} | result, text


def version_of(sanitizer: str) -> str | None:
    done = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=False)
    return next((line.strip() for line in done.stdout.splitlines() if "Version" in line), None)


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.inside is not None:
        if args.zeroed_products:
            zero_products()
        run_modes(args.inside, args.modes, args.device)
        return 0
    sanitizer = shutil.which(args.sanitizer)
    if sanitizer is None:
        print(
            f"sanitize: error: {args.sanitizer} is not on the PATH. It comes with the CUDA toolkit (its folder bin, or "
            "the package nvidia-cuda-sanitizer-api of a distribution): install it, or name it with --sanitizer",
            file=sys.stderr,
        )
        return 2
    results, failed = [], False
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "tiny")
        own = ["--inside", str(model), "--modes", ",".join(args.modes), "--device", args.device]
        inner = [sys.executable, str(Path(__file__).resolve()), *own]
        if not args.no_warm_up:  # kernels are compiled here, and found in Triton's cache by the runs that are timed
            warm = subprocess.run(inner, capture_output=True, text=True, check=False)
            if warm.returncode:
                print(warm.stdout[-2000:], warm.stderr[-4000:], sep="\n", file=sys.stderr)
                print("sanitize: error: the program fails without a tool already", file=sys.stderr)
                return 2
        for tool in args.tools:
            seen = [*inner, *(["--zeroed-products"] if tool == "initcheck" else [])]
            result, text = run_tool(sanitizer, tool, seen, args.timeout)
            results.append(result)
            failed |= result["verdict"] != "clean"
            _print(result, text)
    report = {"sanitizer": version_of(sanitizer), "modes": args.modes, "results": results}
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return int(failed)


def _print(result: dict[str, Any], text: str) -> None:
    counts = "no summary" if result["errors"] is None else f"{result['errors']} errors, {result['warnings']} warnings"
    if ignored := num_ignored(result):
        counts += f" ({ignored} ignored: entry points that the driver lacks)"
    print(f"{result['tool']:<10} {result['verdict']:<10} {counts}, {result['seconds']} s")
    for finding in result["findings"]:
        where = "" if finding["kernel"] is None else f" at {finding['kernel']}"
        mode = "" if finding["mode"] is None else f" ({finding['mode']})"
        print(f"  {finding['count']} x {finding['message']}{where}{mode}")
    if result["verdict"] in ("failed", "timed out"):
        print("\n".join(text.splitlines()[-15:]))


def _words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=_words, default=list(TOOLS), metavar="A,B", help=f"[{','.join(TOOLS)}]")
    parser.add_argument("--modes", type=_words, default=list(MODES), metavar="A,B", help=f"[{','.join(MODES)}]")
    parser.add_argument("--timeout", type=float, default=180.0, metavar="S", help="seconds for each tool [180]")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write what the tools said as JSON")
    parser.add_argument("--sanitizer", default=SANITIZER, metavar="PATH", help=f"[{SANITIZER} on the PATH]")
    parser.add_argument("--no-warm-up", action="store_true", help="no run without a tool first")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--zeroed-products", action="store_true", help=argparse.SUPPRESS)
    return parser


# -- the inner program: what the tools look at -------------------------------------------------------------------------


def zero_products() -> None:
    """`linear` with an output that a kernel filled before the product is written to it."""
    import torch
    from torch.nn import functional

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = x.new_zeros((x.shape[0], weight.shape[0]))
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)

    functional.linear = linear


def run_modes(model: Path, modes: Sequence[str], device: str) -> None:
    """A mark before each mode, and one at the end."""
    sys.path.insert(0, str(SRC))
    from ostinato import LLM, SamplingParams

    prompts = [[(7 * index + 3 * place) % 1000 + 1 for place in range(length)] for index, length in enumerate(LENGTHS)]
    greedy = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, detokenize=False)
    varied = SamplingParams(
        temperature=0.8,
        top_p=0.9,
        top_k=20,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        logprobs=2,
        logit_bias={5: 1.0},
        seed=1,
        max_tokens=4,
        min_tokens=2,
        ignore_eos=True,
        detokenize=False,
    )
    for mode in modes:
        print(MARK + mode, flush=True)
        with LLM(
            str(model),
            load_format="dummy",
            device=device,
            max_model_len=128,
            max_num_seqs=4,
            max_num_batched_tokens=32,
            num_gpu_blocks_override=20,
            cudagraph_mode=mode,
            cudagraph_capture_sizes=[1, 4, 32],
        ) as llm:
            params = [greedy, greedy, varied, greedy, varied]
            for output in llm.generate(prompts, params):
                assert len(output.outputs[0].token_ids) >= 4
            ran = {step.mode for step in llm.stats().steps}
            assert mode == "NONE" or ran - {"NONE"}, f"{mode}: no graph was replayed"
    print(MARK + END, flush=True)


LENGTHS = (3, 17, 40, 1, 9)
"""Of the prompts: more than rows, and one that is cut into steps."""


if __name__ == "__main__":
    sys.exit(main())
