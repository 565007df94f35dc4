"""Builds tokenizers from GGUF metadata: byte-level BPE, with the splitting rule that the file names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from ostinato.errors import ConfigError
from ostinato.tokenizer.tokenizer import Tokenizer

_PREFIX = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

# The splitting patterns are data that the models were trained with, from their published tokenizer.json files.
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "default": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _split(_LLAMA3_PATTERN),
    "qwen2": lambda: _split(_QWEN2_PATTERN),
}


def stop_ids_from_gguf(metadata: Mapping[str, Any]) -> frozenset[int]:
    """The ids that the file says end a text, a turn or a message."""
    return frozenset(metadata[_PREFIX + key] for key in _STOP_KEYS if _PREFIX + key in metadata)


def tokenizer_from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer | None:
    """The tokenizer in a GGUF file's metadata, or None when there is none. `source` names the file in errors.

    Raises ConfigError for a tokenizer model or splitting rule that is not supported, and for one that is incomplete.
    """
    model = metadata.get(_PREFIX + "model")
    if model is None:
        return None
    if model != "gpt2":
        raise ConfigError(
            f"{source}: GGUF tokenizer model {model!r} is not supported, only 'gpt2' (byte-level BPE) is; "
            "use the model's Hugging Face folder, which has a tokenizer.json"
        )
    pre = metadata.get(_PREFIX + "pre")
    if pre not in _PRE_TOKENIZERS:
        raise ConfigError(
            f"{source}: GGUF tokenizer splits text by rule {pre!r}, which is not supported; "
            f"supported are {', '.join(_PRE_TOKENIZERS)}"
        )
    missing = [key for key in ("tokens", "merges", "token_type") if _PREFIX + key not in metadata]
    if missing:
        raise ConfigError(f"{source}: GGUF metadata lacks {', '.join(_PREFIX + key for key in missing)}")
    tokens: list[str] = metadata[_PREFIX + "tokens"]
    kinds: list[int] = metadata[_PREFIX + "token_type"]
    if len(kinds) != len(tokens):
        raise ConfigError(f"{source}: {len(tokens)} tokens but {len(kinds)} token types")

    backend = Backend(_bpe(tokens, metadata[_PREFIX + "merges"], ignore_merges=pre == "llama-bpe", source=source))
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    # They are in the vocabulary already, so they keep their ids; added, they are found whole in a text.
    added = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)

    special_tokens = {
        role: tokens[index]
        for role, key in (
            ("bos_token", "bos_token_id"),
            ("eos_token", "eos_token_id"),
            ("unk_token", "unknown_token_id"),
            ("pad_token", "padding_token_id"),
        )
        if (index := metadata.get(_PREFIX + key)) is not None and index < len(tokens)
    }
    _add_bos_and_eos(backend, metadata, special_tokens, add_bos_by_default=pre == "llama-bpe")
    return Tokenizer(
        backend,
        bos_token_id=metadata.get(_PREFIX + "bos_token_id"),
        eos_token_ids=stop_ids_from_gguf(metadata),
        chat_template=metadata.get("tokenizer.chat_template"),
        special_tokens=special_tokens,
    )


def _bpe(tokens: list[str], merges: list[str], *, ignore_merges: bool, source: str) -> models.BPE:
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ConfigError(f"{source}: {len(tokens) - len(vocab)} tokens occur twice in the vocabulary")
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, blank, right = merge.partition(" ")
        if not blank:
            raise ConfigError(f"{source}: merge {merge!r} is not two tokens with a blank between")
        pairs.append((left, right))
    try:
        return models.BPE(vocab=vocab, merges=pairs, ignore_merges=ignore_merges)
    except Exception as error:  # the Rust side raises plain Exception, e.g. for a merge out of vocabulary
        raise ConfigError(f"{source}: vocabulary and merges do not fit together: {error}") from error


def _add_bos_and_eos(
    backend: Backend, metadata: Mapping[str, Any], special_tokens: Mapping[str, str], *, add_bos_by_default: bool
) -> None:
    wanted = {
        "bos_token": metadata.get(_PREFIX + "add_bos_token", add_bos_by_default),
        "eos_token": metadata.get(_PREFIX + "add_eos_token", False),
    }
    used = {role: special_tokens[role] for role, want in wanted.items() if want and role in special_tokens}
    if used:
        template = [used.get("bos_token"), "$A", used.get("eos_token")]
        ids = [(token, backend.token_to_id(token)) for token in used.values()]
        backend.post_processor = processors.TemplateProcessing(
            single=[piece for piece in template if piece is not None], special_tokens=ids
        )
