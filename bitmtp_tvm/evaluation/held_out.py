"""Text that a model was not trained on, as windows of tokens and as prompts."""

import json
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bitmtp_tvm.errors import BitMTPError, UsageError, shown
from bitmtp_tvm.text import TextCodec

TEXT_ENDINGS = (".py", ".txt", ".md", ".rst")
"""What is read in a folder; a file that is named itself may end as it likes."""

DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class Vocabulary:
    """What tokens mean to a model. `codec`: None for a model without a tokenizer, which reads token
    shards alone. A document is `bos` (where there is one), its text, and `ends[0]` (likewise)."""

    size: int
    codec: TextCodec | None = None
    bos: int | None = None
    ends: tuple[int, ...] = ()


def read_held_out(paths: Sequence[Path], vocabulary: Vocabulary) -> np.ndarray:
    """The tokens `(n,)` int64 of all files, one after the other.

    A path is a token shard (`.bin`, or `.bin.xz`: little-endian uint16, or uint32 for vocabularies
    above 65,536 or where the `.json` beside it says so), a `.jsonl` file (a string a line, or an
    object with a "text"), a text file, or a folder of text files. Raises `BitMTPError`, one
    sentence that names the file, for what cannot be read or has tokens of another model.
    """
    parts = [part for path in paths for part in _read(path, vocabulary)]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _read(path: Path, vocabulary: Vocabulary) -> Iterator[np.ndarray]:
    if path.is_dir():
        found = (file for file in path.rglob("*") if file.suffix in TEXT_ENDINGS)
        files = sorted(file for file in found if file.is_file())
        if not files:
            raise BitMTPError(f"{path} holds no file that ends in {', '.join(TEXT_ENDINGS)}")
        for file in files:
            yield _document(file, _text(file), vocabulary)
    elif path.name.endswith((".bin", ".bin.xz")):
        yield _shard(path, vocabulary.size)
    elif path.suffix == ".jsonl":
        for text in _lines(path):
            yield _document(path, text, vocabulary)
    else:
        yield _document(path, _text(path), vocabulary)


def _bytes(path: Path) -> bytes:
    try:
        if path.suffix == ".xz":
            with lzma.open(path) as file:
                return file.read()
        return path.read_bytes()
    except (OSError, EOFError, lzma.LZMAError) as fault:
        reason = fault.strerror if isinstance(fault, OSError) else f"damaged, {fault}"
        raise BitMTPError(f"{path} cannot be read: {reason}") from fault


def _text(path: Path) -> str:
    try:
        return _bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise BitMTPError(f"{path} is not UTF-8 at byte {fault.start}") from fault


def _lines(path: Path) -> Iterator[str]:
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        text = value.get("text") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise BitMTPError(
                f'{path}, line {number}: neither a JSON string nor an object with a "text"'
            )
        yield text


def _document(path: Path, text: str, vocabulary: Vocabulary) -> np.ndarray:
    if vocabulary.codec is None:
        raise UsageError(f"{path} is text and the model has no tokenizer: give token shards (.bin)")
    if not text:
        return np.zeros(0, np.int64)
    try:
        ids = vocabulary.codec.encode_rendered(text)
    except UsageError as fault:
        raise BitMTPError(f"{path}: {fault}") from fault
    first = [] if vocabulary.bos is None else [vocabulary.bos]
    return np.array([*first, *ids, *vocabulary.ends[:1]], np.int64)


def _shard(path: Path, vocab_size: int) -> np.ndarray:
    data, dtype = _bytes(path), _dtype(path, vocab_size)
    if len(data) % dtype.itemsize:
        raise BitMTPError(
            f"{path} has {len(data)} bytes, which is no whole number of {dtype.name} tokens"
        )
    tokens = np.frombuffer(data, dtype).astype(np.int64)
    if tokens.size and tokens.max() >= vocab_size:
        raise BitMTPError(
            f"{path} holds token id {tokens.max()}, outside the model's vocabulary of "
            f"{vocab_size}: it was tokenised for another model"
        )
    return tokens


def _dtype(path: Path, vocab_size: int) -> np.dtype[Any]:
    header = path.with_name(path.name.removesuffix(".xz").removesuffix(".bin") + ".json")
    name = "uint16" if vocab_size <= 1 << 16 else "uint32"
    if header.is_file():
        try:
            values = json.loads(_text(header))
        except (ValueError, RecursionError) as fault:
            raise BitMTPError(f"{header} is not readable JSON: {fault}") from fault
        name = values.get("dtype", name) if isinstance(values, dict) else name
    if not isinstance(name, str) or name not in DTYPES:
        raise BitMTPError(f"{header}: dtype is {shown(name)}; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def documents(tokens: np.ndarray, vocabulary: Vocabulary) -> list[np.ndarray]:
    """The tokens cut where a document begins: at a `bos`, or behind an end token without one."""
    if vocabulary.bos is not None:
        cuts = np.flatnonzero(tokens == vocabulary.bos)
    else:
        cuts = np.flatnonzero(np.isin(tokens, list(vocabulary.ends))) + 1
    return [part for part in np.split(tokens, cuts) if len(part)]


def _pieces(tokens: np.ndarray, length: int, vocabulary: Vocabulary) -> np.ndarray:
    """`(N, length)`: every document from its beginning on; what is left behind is dropped."""
    whole = [part[: len(part) // length * length] for part in documents(tokens, vocabulary)]
    return np.concatenate([*whole, tokens[:0]]).reshape(-1, length)


def _draw(pieces: np.ndarray, count: int, seed: int) -> np.ndarray:
    """At most `count` of the pieces, in the order of the text."""
    return pieces[np.sort(np.random.default_rng(seed).permutation(len(pieces))[:count])]


def windows(
    tokens: np.ndarray, length: int, count: int, seed: int, vocabulary: Vocabulary
) -> np.ndarray:
    """At most `count` windows `(N, length)` int64 that share no token, each out of one document.

    So no row sees another document, as in training. Raises `UsageError` where no document is so
    long.
    """
    pieces = _pieces(tokens, length, vocabulary)
    if not len(pieces):
        raise UsageError(
            f"the held-out text, {len(tokens)} tokens, has no document of {length}: give more "
            "text, or a smaller --length"
        )
    return _draw(pieces, count, seed)


def prompts(
    tokens: np.ndarray, length: int, count: int, seed: int, vocabulary: Vocabulary
) -> list[list[int]]:
    """At most `count` pieces of `length` tokens, each out of one document and without its end; with
    a `bos` in front where the model's prompts have one. Raises `UsageError` as `windows` does."""
    pieces = _pieces(tokens, length, vocabulary)
    pieces = pieces[~np.isin(pieces, list(vocabulary.ends)).any(1)]
    if not len(pieces):
        raise UsageError(
            f"the held-out text, {len(tokens)} tokens, has no document of {length} to take a "
            "prompt from: give more text, or a smaller --prompt-tokens"
        )
    first = [] if vocabulary.bos is None else [vocabulary.bos]
    found = [piece.tolist() for piece in _draw(pieces, count, seed)]
    return [piece if piece[:1] == first else first + piece for piece in found]
