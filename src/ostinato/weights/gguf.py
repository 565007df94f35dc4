"""GGUF checkpoints: tensors dequantised and renamed to what Hugging Face's modules expect."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ostinato.errors import WeightError
from ostinato.tokenizer.gguf_vocab import stop_ids_from_gguf, tokenizer_from_gguf
from ostinato.tokenizer.tokenizer import Tokenizer
from ostinato.weights.base import TensorInfo
from ostinato.weights.gguf_config import config_from_gguf
from ostinato.weights.gguf_file import GgmlType, GgufTensor, read_gguf
from ostinato.weights.names import ROPE_FREQS, hf_name

_CHUNK_ELEMENTS = 1 << 18
"""Elements dequantised at a time: the temporaries stay in cache, 2x quicker than a tensor at once (threads add nothing,
numpy holds the interpreter lock between its many small operations)."""

_PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufCheckpoint:
    """One `.gguf` file. F32, F16 and BF16 tensors keep their dtype; quantised ones become float32."""

    def __init__(self, path: Path) -> None:
        """Reads the head. Raises WeightError for a broken file, ConfigError for a model that is not supported."""
        self._file = read_gguf(path)
        self._config = config_from_gguf(self._file)
        self._tensors: dict[str, GgufTensor] = {}
        unknown = []
        for name, tensor in self._file.tensors.items():
            if name == ROPE_FREQS:  # already in config["rope_freq_factors"]
                continue
            if (renamed := hf_name(name)) is None:
                unknown.append(name)
            else:
                self._tensors[renamed] = tensor
        if unknown:
            raise WeightError(f"{path}: has tensors that no supported architecture uses: {', '.join(unknown)}")

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def config(self) -> dict[str, Any]:
        return self._config

    @property
    def generation_config(self) -> dict[str, Any]:
        """Only `eos_token_id`, when the file names any: end of text, of turn and of message."""
        stop_ids = sorted(stop_ids_from_gguf(self._file.metadata))
        return {"eos_token_id": stop_ids} if stop_ids else {}

    @property
    def total_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self._tensors.values())

    def tensor_infos(self) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(tensor.shape, _PLAIN_DTYPES.get(tensor.type.name, torch.float32))
            for name, tensor in self._tensors.items()
        }

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors.items():
            raw = self._file.raw(tensor)
            if num_heads := self._interleaved_heads(name):
                raw = _uninterleave(raw, tensor, num_heads)
            yield name, _to_torch(raw, tensor)

    def tokenizer(self) -> Tokenizer | None:
        return tokenizer_from_gguf(self._file.metadata, str(self.path))

    def _interleaved_heads(self, name: str) -> int:
        """How many heads' rows have to be put back into order; 0 for none."""
        if self._config["model_type"] != "llama":
            return 0
        if ".self_attn.q_proj." in name:
            return int(self._config["num_attention_heads"])
        if ".self_attn.k_proj." in name:
            return int(self._config["num_key_value_heads"])
        return 0


def _uninterleave(raw: npt.NDArray[np.uint8], tensor: GgufTensor, num_heads: int) -> npt.NDArray[np.uint8]:
    """Puts the rows of q or k back from GGML's rope order, (pair, half), to Hugging Face's, (half, pair).

    Only whole rows move, so it is done on the packed bytes `raw`; the elements of a bias count as rows.
    """
    num_rows = tensor.shape[0]
    if num_rows % (2 * num_heads):
        raise WeightError(f"{tensor.name}: {num_rows} rows are not {num_heads} heads of even size")
    return raw.reshape(num_heads, num_rows // num_heads // 2, 2, -1).swapaxes(1, 2).reshape(raw.shape)


def _to_torch(raw: npt.NDArray[np.uint8], tensor: GgufTensor) -> torch.Tensor:
    dtype = _PLAIN_DTYPES.get(tensor.type.name)
    if dtype is not None:
        return torch.from_numpy(raw.reshape(-1)).view(dtype).view(tensor.shape)
    return torch.from_numpy(_dequantize(raw, tensor.type)).view(tensor.shape)


def _dequantize(raw: npt.NDArray[np.uint8], ggml_type: GgmlType) -> npt.NDArray[np.float32]:
    """[num_elements] float32. The arithmetic of each type is the gguf package's."""
    from gguf.constants import GGMLQuantizationType  # 0.3 s, and only GGUF files need it
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[ggml_type.name]
    blocks = raw.reshape(-1, ggml_type.type_bytes)
    values = np.empty((len(blocks), ggml_type.block_size), dtype=np.float32)
    step = max(1, _CHUNK_ELEMENTS // ggml_type.block_size)
    for start in range(0, len(blocks), step):
        chunk = blocks[start : start + step]
        # As one long row: the package otherwise loops over groups of 16 rows.
        values[start : start + step] = dequantize(chunk.reshape(1, -1), kind).reshape(len(chunk), -1)
    return values.reshape(-1)
