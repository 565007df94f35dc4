"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ostinato.request import Logprob
from ostinato.server.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from ostinato.tokenizer.detokenizer import token_bytes
from ostinato.tokenizer.tokenizer import Tokenizer

LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have (OpenAI's number)."""

Table = Mapping[int, Logprob]
"""The chosen token first, then the likeliest."""


class Spelling:
    """How a token is shown: its text; part of a character as `bytes:\\xe2`; its id where there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def bytes(self, token_id: int, text: str | None) -> bytes:
        if self._tokenizer is not None and self._tokenizer.is_byte_level:
            token = self._tokenizer.id_to_token(token_id)
            return b"" if token is None else token_bytes(token)
        return (text or "").encode()

    def decode(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode([token_id], skip_special_tokens=False)

    def text(self, token_id: int, text: str | None) -> str:
        if text is None:
            return f"token_id:{token_id}"
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token_id, text))


def chat_logprobs(tables: Sequence[Table], num_top: int, spelling: Spelling) -> ChatLogprobs:
    """`num_top` alternatives of each token, the likeliest first; the chosen one is among them if it is that likely."""

    def show(token_id: int, entry: Logprob) -> TopLogprob:
        text = entry.decoded_token
        return TopLogprob(
            spelling.text(token_id, text), max(entry.logprob, LEAST), list(spelling.bytes(token_id, text))
        )

    content = []
    for table in tables:
        (chosen_id, chosen), *_ = table.items()
        first = show(chosen_id, chosen)
        top = [show(token_id, entry) for token_id, entry in likeliest(table, num_top)]
        content.append(TokenLogprob(first.token, first.logprob, first.bytes, top))
    return ChatLogprobs(content)


def likeliest(table: Table, count: int) -> list[tuple[int, Logprob]]:
    """The entries of rank 1 to `count`."""
    ranked = [(entry.rank, token_id, entry) for token_id, entry in table.items() if entry.rank is not None]
    return [(token_id, entry) for rank, token_id, entry in sorted(ranked, key=lambda item: item[0]) if rank <= count]


def completion_logprobs(
    token_ids: Sequence[int], tables: Sequence[Table | None], num_top: int, spelling: Spelling, offset: int
) -> CompletionLogprobs:
    """`offset` is where the first token's text begins, in characters of the answer. A token without a table has no
    log-probability: the first of a prompt."""
    tokens: list[str] = []
    values: list[float | None] = []
    top: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token_id, table in zip(token_ids, tables, strict=True):
        text = table[token_id].decoded_token if table else spelling.decode(token_id)
        tokens.append(spelling.text(token_id, text))
        values.append(max(table[token_id].logprob, LEAST) if table else None)
        top.append(
            {spelling.text(i, e.decoded_token): max(e.logprob, LEAST) for i, e in likeliest(table, num_top)}
            if table
            else None
        )
        offsets.append(offset)
        offset += len(text or "")
    return CompletionLogprobs(tokens, values, top, offsets)
