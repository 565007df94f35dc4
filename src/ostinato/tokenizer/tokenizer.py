"""One tokenizer for the engine, whatever file it was built from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from ostinato.errors import ConfigError
from ostinato.tokenizer.chat_template import ChatTemplate, Message


class Tokenizer:
    """Text to ids and back, the ids that end a sequence, and the chat template.

    `eos_token_ids` are all ids that end generation: the tokenizer's own and those of the generation config. Safe to
    share between threads: nothing changes after construction but `whole_texts`, which grows.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """`special_tokens` maps roles (`bos_token`, `eos_token`, ...) to text, for the chat template."""
        # Both can be left switched on by whoever saved the file, and would cut or fill prompts in silence.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template
        self._special_tokens = dict(special_tokens or {})
        self._special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self._compiled = None if chat_template is None else ChatTemplate(chat_template, self._special_tokens)
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        """One more than the largest id. A model's embedding may have more rows, never fewer."""
        self.max_token_chars = max(map(len, vocab), default=0)
        """Length of the longest token as spelled: a text has at least this fraction of its length in tokens."""
        self.is_byte_level = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        """Whether tokens spell bytes in GPT-2's alphabet, so that text is the concatenation of the tokens' bytes."""
        self.whole_texts: dict[int, str] = {}
        """Of a byte-level vocabulary: the texts of tokens that begin and end between characters, as far as known."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out by default."""
        return self._special_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Special tokens spelled out in the text become their ids; `add_special_tokens` adds bos or
        what else the model wants around a text, which a rendered chat template already contains.

        Raises ConfigError for text that is not Unicode (lone surrogates).
        """
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (TypeError, UnicodeError) as error:  # TypeError is how the Rust side refuses lone surrogates, too
            raise ConfigError(f"text {text[:40]!r} cannot be tokenized, it must be Unicode: {error}") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Ids without a token (a padded vocabulary) have no text; broken UTF-8 becomes U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def to_json(self) -> str:
        """The tokenizer as `tokenizer.json` has it, without the chat template."""
        return self._backend.to_str()

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, or None if the id has none."""
        return self._backend.id_to_token(token_id) if token_id >= 0 else None

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text for a conversation; encode it with `add_special_tokens=False`.

        `variables` go to the template (`tools`, `enable_thinking`, ...); `chat_template=...` among them is used in
        place of the model's own. Raises ConfigError when there is no template or it refuses the messages.
        """
        source = variables.pop("chat_template", None)
        template = self._compiled if source is None else ChatTemplate(source, self._special_tokens)
        if template is None:
            raise ConfigError("this model has no chat template: pass chat_template=..., or send a plain prompt")
        return template.render(messages, add_generation_prompt=add_generation_prompt, **variables)
