"""Builds tokenizers from a Hugging Face folder: `tokenizer.json` and the files that go with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from ostinato.errors import ConfigError
from ostinato.tokenizer.tokenizer import Tokenizer

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_OTHER_FORMATS = ("tokenizer.model", "spiece.model", "vocab.json", "tekken.json", "tiktoken.model")


def tokenizer_from_folder(
    folder: Path, config: Mapping[str, Any] | None = None, generation_config: Mapping[str, Any] | None = None
) -> Tokenizer | None:
    """The folder's tokenizer, or None when the folder has no tokenizer at all.

    `tokenizer.json` says how text becomes ids, special tokens added included; `tokenizer_config.json` (or
    `special_tokens_map.json`) which tokens are bos and eos; `chat_template.jinja` goes before a template in
    `tokenizer_config.json`. The eos ids are the tokenizer's and `generation_config`'s together, or `config`'s when
    neither names one. Raises ConfigError for broken files and for tokenizers in other formats only.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        others = [name for name in _OTHER_FORMATS if (folder / name).is_file()]
        if others:
            raise ConfigError(f"{folder}: has {', '.join(others)} but no tokenizer.json, the only format supported")
        return None
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the Rust side raises plain Exception
        raise ConfigError(f"{path}: is not a tokenizer: {error}") from error
    settings = _read_object(folder / "special_tokens_map.json") | _read_object(folder / "tokenizer_config.json")
    _add_missing_tokens(backend, settings, folder)

    special_tokens = {role: text for role in _ROLES if (text := _token_text(settings.get(role))) is not None}
    eos_ids = _id_set((generation_config or {}).get("eos_token_id"))
    if (eos := backend.token_to_id(special_tokens.get("eos_token", ""))) is not None:
        eos_ids |= {eos}
    config = config or {}
    bos_id = backend.token_to_id(special_tokens.get("bos_token", ""))
    return Tokenizer(
        backend,
        bos_token_id=bos_id if bos_id is not None else config.get("bos_token_id"),
        eos_token_ids=eos_ids or _id_set(config.get("eos_token_id")),
        chat_template=_chat_template(folder, settings),
        special_tokens=special_tokens,
    )


def _add_missing_tokens(backend: Backend, settings: Mapping[str, Any], folder: Path) -> None:
    """Adds tokens that only `tokenizer_config.json` lists; they must come out with the ids listed there."""
    listed = settings.get("added_tokens_decoder", {})
    for text_id, spec in sorted(listed.items(), key=lambda item: int(item[0])):
        content = spec["content"]
        if backend.token_to_id(content) is not None:
            continue
        backend.add_tokens([AddedToken(content, **{flag: bool(spec.get(flag, False)) for flag in _TOKEN_FLAGS})])
        if backend.token_to_id(content) != int(text_id):
            raise ConfigError(
                f"{folder}: tokenizer_config.json adds token {content!r} as id {text_id}, "
                f"but the next free id in tokenizer.json is {backend.token_to_id(content)}"
            )


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name, of which "default" is for plain chat
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _token_text(value: Any) -> str | None:
    """A special token is written as its text, or as an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _id_set(value: Any) -> frozenset[int]:
    """`eos_token_id` is an id, a list of ids, or absent."""
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a JSON {type(value).__name__}, an object was expected")
    return value
