"""Text to token ids and back, whole or as it grows."""

import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from bitmtp_tvm.errors import BitMTPError, UsageError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TextCodec:
    """A tokenizer.json together with what the model adds in front of a prompt.

    `add_bos`: a prompt is [`bos_token_id`] + encode(text); the tokenizer's own template is not
    used. `vocab_size`: rows of the model's embedding. Raises `BitMTPError` for an unreadable file
    or a start token that is wanted and unknown.
    """

    def __init__(
        self, tokenizer: Path, add_bos: bool, bos_token_id: int | None, vocab_size: int
    ) -> None:
        self._tokenizer = read_tokenizer(tokenizer)
        self._vocab_size = vocab_size
        if add_bos and bos_token_id is None:
            raise BitMTPError(f"{tokenizer}: prompts start with a start token, but none is named")
        self._start = [bos_token_id] if add_bos and bos_token_id is not None else []
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.byte_ids = frozenset(i for t, i in vocabulary.items() if BYTE_TOKEN.fullmatch(t))

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt. Special tokens written out in `text` become their ids.

        Raises `UsageError` for text that is not valid Unicode, that gives no token at all, or that
        gives an id which the model has no row for.
        """
        ids = self._start + self._ids(text)
        if not ids:
            raise UsageError(
                "the prompt is empty and this model has no start token: give some text"
            )
        return ids

    def encode_rendered(self, text: str) -> list[int]:
        """The ids of a prompt that a chat template wrote, which is whole: nothing is put in front.

        Raises `UsageError` as `encode` does.
        """
        ids = self._ids(text)
        if not ids:
            raise UsageError("the chat template makes an empty prompt of this: give some text")
        return ids

    def _ids(self, text: str) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as fault:
            raise UsageError(
                f"the prompt is not valid Unicode at character {fault.start}: give it as UTF-8"
            ) from fault
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        for token, word in zip(encoding.ids, encoding.tokens, strict=True):
            if token >= self._vocab_size:
                raise UsageError(
                    f"the prompt's token {word!r} has id {token}, outside the model's vocabulary "
                    f"of {self._vocab_size}: the tokenizer belongs to another model"
                )
        return list(encoding.ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens are left out, invalid UTF-8 becomes U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


class TextStream:
    """The text of ids that arrive one by one.

    The pieces, joined, are a prefix of `decode(ids)` at any time and equal to it after `flush`:
    bytes of an unfinished character are held back until it is complete. (The tokenizers library's
    own stream has no flush, and raises on invalid bytes of a vocabulary with byte tokens.)
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        # The ids of the last piece: some decoders treat the first token of a text differently.
        self._shown: list[int] = []
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes, often its own, sometimes none."""
        self._held.append(token)
        # One bad byte turns a whole run of byte tokens into U+FFFD: wait for the end of the run.
        return "" if token in self._codec.byte_ids else self._take(final=False)

    def flush(self) -> str:
        """What is still held back, now that no token follows."""
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        shown = self._codec.decode(self._shown)
        text = self._codec.decode(self._shown + self._held)[len(shown) :]
        if text.endswith(REPLACEMENT) and not final:
            return ""
        self._shown = self._held if text else self._shown + self._held
        self._held = []
        return text


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json, without the truncation and padding it may ask for."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as fault:  # the library raises nothing narrower
        raise BitMTPError(f"{path} is not a readable tokenizer.json: {fault}") from fault
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
