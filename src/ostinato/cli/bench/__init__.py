"""Measures a model on this machine. Every number has a line in docs/benchmarks.md that says what it means.

Prompts are random token ids, outputs do not stop early and no text is made. With --load-format dummy a folder that
holds nothing but config.json is enough. `serve` loads no model: it measures a server that runs, here or elsewhere.
"""

COMMANDS = {
    "decode": "time per output token by batch size, beside the floor of the bytes that a step reads",
    "prefill": "time to the first token by prompt length",
    "throughput": "many requests of mixed lengths: tokens per second",
    "startup": "process start to first token, part by part, and what recording took",
    "reconfigure": "seconds and bytes of recording: at the start, while requests run, lazily, in the background",
    "modes": "time per output token by CUDA graph mode, each mode in a fresh process",
    "profile": "time of the kernels of a decode step, by kind and by layer (CUDA)",
    "serve": "load test of a server with OpenAI's API: latencies, throughput, goodput",
}
"""Each is the module of that name, with `configure(parser)` and `run(args) -> int`."""
