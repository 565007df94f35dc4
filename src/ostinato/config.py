"""Every option of the engine, with vLLM's names where vLLM has the thing, checked before anything is built.

No torch here: dtypes and devices are names until `engine.resolve` turns them into objects.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ostinato.errors import ConfigError
from ostinato.graphs.mode import LAYER_CUTS, CUDAGraphMode

DTYPES = ("auto", "float32", "float16", "bfloat16")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
ATTENTION_BACKENDS = ("auto", "FLASH_ATTN", "TRITON_ATTN")
CAPTURES = ("eager", "lazy", "background")
AUTO = "auto"
LADDERS = ("uniform", "mixed")
MAX_NUM_SEQS = 1 << 16  # rows are counted in 16 bits on the device (kernels.decode_tiles)
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """`model`: a Hugging Face folder, a `.gguf` file, or "smollm2" (the packaged SmolLM2-135M-Instruct).

    device                   "cpu", "cuda", "cuda:1"; None takes CUDA where it is.
    dtype                    of weights, activations and KV. "auto": float32 on the CPU; on CUDA the checkpoint's
                             16-bit type, else bfloat16.
    kv_cache_dtype           of the KV cache. "auto": `dtype`; "fp8", "fp8_e4m3": one byte and scales for each layer and
                             kv head; see docs/kv-cache.md.
    calculate_kv_scales      where the checkpoint has no such scales, set them by the first prompt; else they are 1.
    max_model_len            tokens of prompt and output together; None takes the model's.
    max_num_seqs             requests that run at once; the ladder of recorded decode batches ends here.
    max_num_batched_tokens   tokens of one step over all requests; longer prompts run in chunks.
    num_gpu_blocks_override  KV blocks; None fills the memory budget.
    gpu_memory_utilization   share of the device that weights, activations, graphs and KV may take together.
    cudagraph_mode           NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE.
    attention_backend        of prompts; decode has kernels of its own. "FLASH_ATTN": FlashAttention-3, on compute
                             capability 9.0, with dtype and KV of the same 16 bits (`pip install 'ostinato[flash]'`);
                             "TRITON_ATTN": our kernels; "auto": the first where it can, never with batch_invariant.
    cudagraph_cut            where PIECEWISE cuts a layer. "attention": all of attention runs between graphs;
                             "kv_gather": only writing KV and copying that of the step's rows to a workspace of
                             max_num_seqs x max_model_len tokens, over which the graph attends. All modes then go that
                             way, cut or not; see docs/cuda-graphs.md.
    cudagraph_capture_sizes  ladder to record instead of the default: requests for uniform batches, tokens for
                             mixed ones; or one each: {"uniform": [...], "mixed": [...]}, either by default.
    enforce_eager            no graphs and no compile.
    kv_transfer_config       a connector that KV comes from and goes to, as in vLLM: an object (or its JSON) with
                             `kv_connector`, `kv_role` and `kv_connector_extra_config`; see docs/connectors.md.
    capture                  "eager": all is recorded before the first request; "lazy": a few sizes are, and others once
                             steps have asked for them; "background": a few are, the rest between steps.
    max_in_flight            steps launched before one is collected; None: 2 on CUDA, 1 on the CPU.
    compile                  torch.compile over the functions of a layer.
    batch_invariant          a request's tokens and log-probabilities have the same bits whatever runs beside it, in
                             every mode and however its prompt is cut; slower. Not with compile.
    enable_layerwise_nvtx_tracing
                             NVTX ranges by layer around what is recorded or runs eagerly, for Nsight; CUDA only.
    check, poison            compare the first `check` replays of every key with an eager run, bit for bit, with
                             (poison) NaN in everything that a live row must not read.
    """

    model: str
    device: str | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    calculate_kv_scales: bool = True
    load_format: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    attention_backend: str = "auto"
    capture: str = "eager"
    cudagraph_mode: str = "FULL_AND_PIECEWISE"
    cudagraph_cut: str = "attention"
    cudagraph_capture_sizes: Sequence[int] | Mapping[str, Sequence[int]] | None = None
    max_in_flight: int | None = None
    compile: bool = False
    batch_invariant: bool = False
    kv_transfer_config: Mapping[str, Any] | None = None
    enable_layerwise_nvtx_tracing: bool = False
    seed: int = 0
    check: int = 0
    poison: bool = True

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be {rule}")

        def whole(name: str) -> bool:
            value = getattr(self, name)
            return isinstance(value, int) and not isinstance(value, bool)

        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            need(whole(name) and getattr(self, name) >= 1, name, "a whole number of at least 1")
        need(self.max_num_seqs <= MAX_NUM_SEQS, "max_num_seqs", f"at most {MAX_NUM_SEQS}")
        for name in ("max_model_len", "num_gpu_blocks_override", "max_in_flight"):
            need(getattr(self, name) is None or (whole(name) and getattr(self, name) >= 1), name, "None or at least 1")
        need(self.dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}")
        need(self.kv_cache_dtype in KV_CACHE_DTYPES, "kv_cache_dtype", f"one of {', '.join(KV_CACHE_DTYPES)}")
        need(self.load_format in LOAD_FORMATS, "load_format", f"one of {', '.join(LOAD_FORMATS)}")
        need(
            self.attention_backend in ATTENTION_BACKENDS, "attention_backend", f"one of {', '.join(ATTENTION_BACKENDS)}"
        )
        need(
            not (self.batch_invariant and self.attention_backend == "FLASH_ATTN"),
            "attention_backend",
            "auto or TRITON_ATTN with batch_invariant, which has attention of its own",
        )
        need(self.capture in CAPTURES, "capture", f"one of {', '.join(CAPTURES)}")
        need(self.cudagraph_cut in LAYER_CUTS, "cudagraph_cut", f"one of {', '.join(LAYER_CUTS)}")
        need(self.block_size & (self.block_size - 1) == 0, "block_size", "a power of two")
        need(self.max_model_len is None or self.max_model_len >= 2, "max_model_len", "at least 2: a prompt, an output")
        need(0.0 < self.gpu_memory_utilization <= 1.0, "gpu_memory_utilization", "above 0 and at most 1")
        need(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            f"at least max_num_seqs ({self.max_num_seqs}), or a full decode batch would not fit a step",
        )
        need(self.max_in_flight is None or self.max_in_flight <= 2, "max_in_flight", "1 or 2")
        need(
            self.num_gpu_blocks_override is None or self.num_gpu_blocks_override >= 2,
            "num_gpu_blocks_override",
            "at least 2, as block 0 is reserved",
        )
        need(
            not (self.batch_invariant and self.compile),
            "batch_invariant",
            "False with compile, whose matrix products depend on the batch; turn one of them off",
        )
        need(whole("check") and self.check >= 0, "check", "at least 0")
        if self.device is not None and self.device.split(":")[0] not in ("cpu", "cuda"):
            raise ConfigError(f"device={self.device!r}: must be cpu, cuda or cuda:N")
        need(
            self.kv_transfer_config is None or isinstance(self.kv_transfer_config, Mapping),
            "kv_transfer_config",
            "an object such as {'kv_connector': 'OffloadingConnector'}",
        )
        sizes: object = self.cudagraph_capture_sizes
        if sizes == AUTO:
            raise ConfigError(
                "cudagraph_capture_sizes='auto' needs steps that were counted: start without it and, after some "
                "traffic, call reconfigure(cudagraph_capture_sizes='auto'), or give the sizes that `ostinato tune` "
                "prints"
            )
        names_a_ladder = isinstance(sizes, Mapping) and set(sizes) <= set(LADDERS)
        is_list = isinstance(sizes, Iterable) and not isinstance(sizes, str | Mapping)
        need(
            sizes is None or names_a_ladder or is_list,
            "cudagraph_capture_sizes",
            "a list of sizes, or {'uniform': [...], 'mixed': [...]}",
        )
        CUDAGraphMode.parse(self.cudagraph_mode)

    @property
    def resolved_mode(self) -> CUDAGraphMode:
        return CUDAGraphMode.NONE if self.enforce_eager else CUDAGraphMode.parse(self.cudagraph_mode)

    @property
    def compiles(self) -> bool:
        return self.compile and not self.enforce_eager

    @classmethod
    def from_options(cls, model: str, options: dict[str, Any]) -> EngineConfig:
        """Raises ConfigError that names the nearest option when one is unknown."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(known)}"
                raise ConfigError(f"unknown option {name!r}: {hint}")
        return cls(model=model, **options)
