"""A GGUF vocabulary as the JSON text of a `tokenizers` tokenizer, and what stands around it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bitmtp_tvm.checkpoint.gguf_file import GGUFFile
from bitmtp_tvm.checkpoint.gguf_vocabulary import PRE_TOKENIZERS, byte_level, sentence_piece
from bitmtp_tvm.checkpoint.token_ids import guarded
from bitmtp_tvm.errors import BitMTPError, shown

# Token types of the format; 1 is normal, 6 a byte.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
# Names that a file may leave out, or write as "default", and tokens that tell them all the same.
_UNNAMED = (None, "", "default")
_TELLING = {"<|begin_of_text|>": "llama-bpe", "<|im_start|>": "qwen2"}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Tokens that end a turn where the chat template writes them; not every file names them as an end.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")
_TEMPLATE_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


@dataclass(frozen=True)
class GGUFText:
    """See the fields of the same names in `Checkpoint`; `tokenizer` is its JSON text, or None."""

    tokenizer: str | None = None
    add_bos: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    special_tokens: dict[str, str] = field(default_factory=dict)
    chat_template: str | None = None


def read_gguf_text(file: GGUFFile, vocab_size: int) -> GGUFText:
    """Everything about text in the keys `tokenizer.…`, for a model of `vocab_size` rows.

    Raises BitMTPError for an id outside the rows, more tokens than rows, a vocabulary of an unknown
    kind, and one that does not hold together.
    """
    keys = _Keys(file)
    bos = keys.token_id("bos_token_id", vocab_size)
    ends = [keys.token_id(key, vocab_size) for key in _END_KEYS]
    template = keys.text("tokenizer.chat_template")
    if keys.model is None:
        found = tuple(dict.fromkeys(end for end in ends if end is not None))
        return GGUFText(None, False, bos, found, {}, template)
    tokens, types = _tokens(keys, vocab_size)
    ends += [
        place
        for place, token in enumerate(tokens)
        if token in _TURN_ENDS and token in (template or "") and types[place] == _CONTROL
    ]
    named = {
        name: tokens[token]
        for name, key in _TEMPLATE_NAMES.items()
        if (token := keys.token_id(key, vocab_size)) is not None and token < len(tokens)
    }
    kind = _kind(keys, tokens)
    return GGUFText(
        tokenizer=_tokenizer(keys, kind, tokens, types),
        add_bos=_adds_bos(keys, kind, bos),
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        special_tokens=named,
        chat_template=template,
    )


class _Keys:
    """The keys `tokenizer.ggml.…`, each with the type that it must have."""

    def __init__(self, file: GGUFFile) -> None:
        self.path: Path = file.path
        self._keys = file.keys
        self.model = self.text("tokenizer.ggml.model")

    def text(self, key: str) -> str | None:
        value = self._keys.get(key)
        if value is not None and not isinstance(value, str):
            raise BitMTPError(f"{self.path}: {key} is no text")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._keys.get(f"tokenizer.ggml.{name}", default)
        if type(value) is not bool:
            raise BitMTPError(
                f"{self.path}: tokenizer.ggml.{name} is {shown(value)}, neither yes nor no"
            )
        return value

    def token_id(self, name: str, vocab_size: int) -> int | None:
        value = self._keys.get(f"tokenizer.ggml.{name}")
        if value is not None and (type(value) is not int or not 0 <= value < vocab_size):
            raise BitMTPError(
                f"{self.path}: tokenizer.ggml.{name} is {shown(value)}, outside the {vocab_size} "
                "rows of the vocabulary"
            )
        return value

    def texts(self, name: str) -> list[str]:
        value = self._keys.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, list):
            raise BitMTPError(f"{self.path} has no texts in tokenizer.ggml.{name}")
        return value

    def numbers(self, name: str, count: int) -> np.ndarray | None:
        """One number a token, or None where the key is missing."""
        value: Any = self._keys.get(f"tokenizer.ggml.{name}")
        if value is not None and (not isinstance(value, np.ndarray) or value.shape != (count,)):
            raise BitMTPError(
                f"{self.path}: tokenizer.ggml.{name} must hold {count} numbers, one for each token"
            )
        return value


def _tokens(keys: _Keys, vocab_size: int) -> tuple[list[str], list[int]]:
    """The tokens and their types."""
    tokens = keys.texts("tokens")
    if len(tokens) > vocab_size:
        raise BitMTPError(
            f"{keys.path}: its tokenizer has {len(tokens)} tokens, but token_embd.weight only "
            f"{vocab_size} rows"
        )
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
        raise BitMTPError(f"{keys.path}: the token {shown(twice)} stands twice in its vocabulary")
    types = keys.numbers("token_type", len(tokens))
    return tokens, [1] * len(tokens) if types is None else types.tolist()


def _kind(keys: _Keys, tokens: list[str]) -> str:
    """The pre-tokenizer of a byte-level vocabulary, or "llama" for SentencePiece."""
    if keys.model == "llama":
        return "llama"
    if keys.model != "gpt2":
        raise BitMTPError(
            f"{keys.path}: tokenizer.ggml.model is {shown(keys.model)}; supported are gpt2 and "
            "llama"
        )
    name = keys.text("tokenizer.ggml.pre")
    if name in _UNNAMED:
        known = set(tokens)
        name = next((kind for token, kind in _TELLING.items() if token in known), name)
    if name not in tuple(PRE_TOKENIZERS):
        raise BitMTPError(
            f"{keys.path}: tokenizer.ggml.pre is {shown(name)}; supported are "
            f"{', '.join(PRE_TOKENIZERS)}: compile from the Hugging Face directory instead"
        )
    return str(name)


def _tokenizer(keys: _Keys, kind: str, tokens: list[str], types: list[int]) -> str:
    """The JSON text, which the tokenizers library reads."""
    vocabulary = {token: place for place, token in enumerate(tokens) if types[place] != _UNUSED}
    added = [
        {
            "id": place,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": types[place] != _USER_DEFINED,
        }
        for place, token in enumerate(tokens)
        if types[place] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    if kind == "llama":
        scores = keys.numbers("scores", len(tokens))
        if scores is None:
            raise BitMTPError(f"{keys.path} lacks the key tokenizer.ggml.scores")
        unknown = next((t for t, number in zip(tokens, types, strict=True) if number == 2), None)
        prefix = keys.flag("add_space_prefix", True)
        parts = sentence_piece(keys.path, vocabulary, scores.tolist(), unknown, prefix)
    else:
        parts = byte_level(keys.path, vocabulary, keys.texts("merges"), kind)
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts}
    text = json.dumps(whole, ensure_ascii=False)
    guarded(keys.path, lambda: Tokenizer.from_str(text))
    return text


def _adds_bos(keys: _Keys, kind: str, bos: int | None) -> bool:
    """`add_bos_token`; without it what this kind of vocabulary is known to do."""
    if keys.flag("add_eos_token", False):
        raise BitMTPError(
            f"{keys.path}: tokenizer.ggml.add_eos_token is set; prompts that end with an end token "
            "are not supported"
        )
    wanted = keys.flag("add_bos_token", bos is not None and kind in ("llama", "llama-bpe"))
    if wanted and bos is None:
        raise BitMTPError(
            f"{keys.path} sets tokenizer.ggml.add_bos_token, but lacks tokenizer.ggml.bos_token_id"
        )
    return wanted
