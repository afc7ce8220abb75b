"""The two kinds of GGUF vocabularies as parts of a `tokenizers` tokenizer's JSON."""

from pathlib import Path
from typing import Any

from bitmtp_tvm.errors import BitMTPError, shown

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
# Longer ones make the search for merges endless; published vocabularies stay below 64.
_LONGEST_TOKEN = 1024


def _split_pattern(digits: str) -> str:
    """Contractions, words, digits (`digits` says how many), signs, white space."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _split_first(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    parts = [{**split, "invert": False}, {**_BYTES, "use_regex": False}]
    return {"type": "Sequence", "pretokenizers": parts}


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
_QWEN = {"normalizer": {"type": "NFC"}, "pre_tokenizer": _split_first(_split_pattern(""))}
_LLAMA = {"normalizer": None, "pre_tokenizer": _split_first(_split_pattern("{1,3}"))}
# `tokenizer.ggml.pre` to what comes before the merges.
PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "gpt-2": {"normalizer": None, "pre_tokenizer": _BYTES},
}


def byte_level(
    path: Path, vocabulary: dict[str, int], merges: list[str], kind: str
) -> dict[str, Any]:
    """Byte pairs in the order of `merges`, each two tokens with a space between."""
    pairs = [_pair(path, merge, vocabulary) for merge in merges]
    return {
        **PRE_TOKENIZERS[kind],
        "post_processor": None,
        "decoder": {**_BYTES, "add_prefix_space": True},
        # Llama 3 takes a word that is a token as it is, whatever the merges make of it.
        "model": _model(vocabulary, pairs, ignore_merges=PRE_TOKENIZERS[kind] is _LLAMA),
    }


def sentence_piece(
    path: Path, vocabulary: dict[str, int], scores: list[float], unknown: str | None, prefix: bool
) -> dict[str, Any]:
    """Pieces of which the one with the best score is merged first; other characters are bytes.

    `prefix`: a text begins with a space that is not shown.
    """
    spaces = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        spaces.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    pairs = _best_first(path, vocabulary, scores)
    return {
        "normalizer": {"type": "Sequence", "normalizers": spaces},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _model(
            vocabulary, pairs, unk_token=unknown, fuse_unk=unknown is not None, byte_fallback=True
        ),
    }


def _model(
    vocabulary: dict[str, int], pairs: list[tuple[str, str]], **options: Any
) -> dict[str, Any]:
    return {"type": "BPE", "vocab": vocabulary, "merges": pairs, **options}


def _pair(path: Path, merge: str, vocabulary: dict[str, int]) -> tuple[str, str]:
    # Not at the very beginning: a token may be a space.
    place = merge.find(" ", 1)
    left, right = merge[:place], merge[place + 1 :]
    if place < 0 or not {left, right, left + right} <= vocabulary.keys():
        raise BitMTPError(
            f"{path}: tokenizer.ggml.merges has {shown(merge)}, whose parts are not all tokens"
        )
    return left, right


def _best_first(
    path: Path, vocabulary: dict[str, int], scores: list[float]
) -> list[tuple[str, str]]:
    """Every way to make a token of two others; the better the token's score, the earlier."""
    pairs = []
    for token in sorted(vocabulary, key=lambda token: -scores[vocabulary[token]]):
        if len(token) > _LONGEST_TOKEN:
            raise BitMTPError(
                f"{path}: its token {vocabulary[token]} is {len(token)} characters long; "
                f"{_LONGEST_TOKEN} are supported"
            )
        splits = [(token[:place], token[place:]) for place in range(1, len(token))]
        pairs += [pair for pair in splits if pair[0] in vocabulary and pair[1] in vocabulary]
    return pairs
