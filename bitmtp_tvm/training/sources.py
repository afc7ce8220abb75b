"""Text files, directories, JSON lines and tokenised shards become token shards, once."""

import hashlib
import json
import lzma
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bitmtp_tvm.checkpoint.token_ids import guarded
from bitmtp_tvm.cli import check_stopped
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.text import read_tokenizer
from bitmtp_tvm.training.data import Header, TokenShards, narrowest, write_shard

# Part of the name of what is cached: raise it when the same files give other shards.
_VERSION = 2
# Of all documents, one in so many is kept for validation where no other data is given.
HELD_OUT = 50
_DOCUMENTS_AT_ONCE = 256
_SHARD_TOKENS = 1 << 26
_BYTES_AT_ONCE = 1 << 24
_XZ = ".bin.xz"
_FIELDS = ("text", "content")


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer.json and the ids that begin and end a document."""

    path: Path
    size: int
    digest: str
    bos: int | None
    eos: int | None

    def named(self, word: str) -> int | None:
        """The id of a token, or None."""
        return read_tokenizer(self.path).token_to_id(word)

    def header(self, tokens: int) -> Header:
        """The header of a shard of so many tokens."""
        return Header(narrowest(self.size), tokens, self.size, self.digest, self.bos, self.eos)


@dataclass(frozen=True)
class Prepared:
    """Shards to train on and to validate on; the latter may be missing."""

    train: TokenShards
    validation: TokenShards | None


def read_vocabulary(path: Path, bos: int | None = None, eos: int | None = None) -> Vocabulary:
    """The vocabulary of a tokenizer.json; ids that are not given are looked for by usual names."""
    if not path.is_file():
        raise BitMTPError(f"{path} is not there: --tokenizer takes a tokenizer.json")
    tokenizer = read_tokenizer(path)
    named = tokenizer.get_vocab(with_added_tokens=True)
    if not named:
        raise BitMTPError(f"{path} has no tokens")
    size = max(named.values()) + 1
    for word, value in ("bos", bos), ("eos", eos):
        if value is not None and not (isinstance(value, int) and 0 <= value < size):
            raise BitMTPError(f"the {word} token is {value!r}, and {path} has {size} tokens")
    for name in ("<|bos|>", "<s>", "<|begin_of_text|>", "<bos>"):
        bos = named.get(name) if bos is None else bos
    for name in ("<|eos|>", "</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>"):
        eos = named.get(name) if eos is None else eos
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Vocabulary(path, size, digest, bos, eos)


def prepare(
    data: Sequence[str],
    validation: Sequence[str],
    vocabulary: Vocabulary,
    cache: Path,
    output: Path | None = None,
) -> Prepared:
    """The shards of `data` and `validation`, made below `cache` unless they are there already.

    A directory with `*.bin.xz` holds tokenised shards: raw uint16, every document bos + tokens +
    eos; those that begin with `val` are for validation. Everything else is text. Without
    `validation` every fiftieth document is held out. What a run wrote itself, in `cache` and
    `output`, is no data. Raises UsageError for what is not there.
    """
    own = [path.resolve() for path in (cache, output) if path is not None]
    train, held = _files("--data", data, own), _files("--validation-data", validation, own)
    tokenised = [path for path in (*train, *held) if path.name.endswith(_XZ)]
    if tokenised and len(tokenised) != len(train) + len(held):
        raise UsageError("--data mixes tokenised shards with text: give one kind")
    if tokenised:
        if not held:
            held = [path for path in train if path.name.startswith("val")]
            train = [path for path in train if path not in held]
        made = [_cached(cache, vocabulary, files, unpack) for files in (train, held)]
    elif held:
        made = [_cached(cache, vocabulary, files, tokenise) for files in (train, held)]
    else:
        folder = _cached_folder(cache, vocabulary, train, "split", _tokenise_split)
        made = [sorted((folder / part).glob("*.bin")) for part in ("train", "validation")]
    if not made[0]:
        raise UsageError(f"{', '.join(data)} holds nothing to train on")
    if validation and not made[1]:
        raise UsageError(f"{', '.join(validation)} holds nothing to validate on")
    return Prepared(TokenShards(made[0]), TokenShards(made[1]) if made[1] else None)


def _files(option: str, places: Sequence[str], own: Sequence[Path]) -> list[Path]:
    """Files of a list of files and directories, those of a directory sorted, shards before text;
    without hidden ones and those below `own`."""
    found: list[Path] = []
    for place in places:
        path = Path(place)
        if path.is_file():
            found.append(path)
        elif path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file())
            # Resolved once: a corpus has many files.
            whole = path.resolve()
            inside = [p for p in inside if not _below(whole / p.relative_to(path), own)]
            shards = [p for p in inside if p.name.endswith(_XZ)]
            found += shards or [p for p in inside if not _hidden(p.relative_to(path))]
        else:
            raise UsageError(f"{option}: {place} is not there")
    return found


def _below(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def tokenise(files: Sequence[Path], vocabulary: Vocabulary, out: Path) -> list[Path]:
    """Tokenise files into shards below `out`, which exists; returns the shards.

    Every file is a document, and every line of a `.jsonl` is one by its `text` or `content`. A
    document is bos + tokens + eos, as far as the vocabulary has them.
    """
    return _write(_tokens(files, vocabulary), vocabulary, out)


def _tokenise_split(files: Sequence[Path], vocabulary: Vocabulary, out: Path) -> list[Path]:
    """As `tokenise`, every `HELD_OUT`-th document into `validation`, the others into `train`."""
    kept: list[np.ndarray] = []

    def training() -> Iterator[np.ndarray]:
        for number, document in enumerate(_tokens(files, vocabulary), start=1):
            if number % HELD_OUT:
                yield document
            else:
                kept.append(document)

    for part in ("train", "validation"):
        (out / part).mkdir()
    shards = _write(training(), vocabulary, out / "train")
    return shards + _write(kept, vocabulary, out / "validation")


def _tokens(files: Sequence[Path], vocabulary: Vocabulary) -> Iterator[np.ndarray]:
    tokenizer = read_tokenizer(vocabulary.path)
    texts = _documents(files)
    before = [] if vocabulary.bos is None else [vocabulary.bos]
    behind = [] if vocabulary.eos is None else [vocabulary.eos]
    while batch := list(islice(texts, _DOCUMENTS_AT_ONCE)):
        encoded = guarded(
            vocabulary.path, partial(tokenizer.encode_batch, batch, add_special_tokens=False)
        )
        for encoding in encoded:
            yield np.array([*before, *encoding.ids, *behind], narrowest(vocabulary.size))


def _documents(files: Sequence[Path]) -> Iterator[str]:
    skipped = 0
    for path in tqdm(files, "tokenising", unit="file", disable=None):
        if path.suffix == ".jsonl":
            yield from _lines(path)
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            skipped += 1
            continue
        if text.strip():
            yield text
    if skipped:
        print(f"{skipped} files are no UTF-8 text and were left out", file=sys.stderr)


def _lines(path: Path) -> Iterator[str]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as fault:
                raise BitMTPError(f"{path}:{number} is not valid JSON: {fault}") from fault
            values = [value[f] for f in _FIELDS if isinstance(value, dict) and f in value]
            if isinstance(value, str):
                values = [value]
            if not values or not isinstance(values[0], str):
                raise BitMTPError(f"{path}:{number} has no text: give it as {' or '.join(_FIELDS)}")
            try:
                values[0].encode("utf-8")
            except UnicodeEncodeError as fault:
                raise BitMTPError(f"{path}:{number} is no text: {fault}") from fault
            yield values[0]


def _write(documents: Iterable[np.ndarray], vocabulary: Vocabulary, out: Path) -> list[Path]:
    """Documents into shards of at most `_SHARD_TOKENS`, no document in two of them."""
    paths: list[Path] = []
    waiting: list[np.ndarray] = []
    held = 0

    def flush() -> None:
        tokens = np.concatenate(waiting)
        paths.append(out / f"{len(paths):05d}.bin")
        write_shard(paths[-1], tokens, vocabulary.header(len(tokens)))
        waiting.clear()

    for document in documents:
        check_stopped()
        if waiting and held + len(document) > _SHARD_TOKENS:
            flush()
            held = 0
        waiting.append(document)
        held += len(document)
    if waiting:
        flush()
    return paths


def unpack(files: Sequence[Path], vocabulary: Vocabulary, out: Path) -> list[Path]:
    """Unpack `*.bin.xz` (raw uint16) into shards below `out`; returns the shards.

    Raises BitMTPError for a damaged file and for an id that the vocabulary does not have.
    """
    paths = []
    for index, path in enumerate(tqdm(files, "unpacking", unit="file", disable=None)):
        # Numbered: files of several directories may have one name.
        paths.append(out / f"{index:05d}-{path.name.removesuffix('.xz')}")
        largest = tokens = 0
        try:
            with lzma.open(path) as packed, paths[-1].open("wb") as file:
                while block := packed.read(_BYTES_AT_ONCE):
                    check_stopped()
                    ids = np.frombuffer(block, np.uint16)
                    largest, tokens = max(largest, int(ids.max())), tokens + len(ids)
                    file.write(block)
        except (lzma.LZMAError, EOFError, ValueError) as fault:
            raise BitMTPError(f"{path} cannot be unpacked: {fault}") from fault
        if largest >= vocabulary.size:
            raise BitMTPError(
                f"{path} holds the id {largest}, and {vocabulary.path} has {vocabulary.size}: it "
                "belongs to another tokenizer"
            )
        header = replace(vocabulary.header(tokens), dtype="uint16")
        paths[-1].with_suffix(".json").write_text(json.dumps(asdict(header)))
    return paths


def _cached(cache: Path, vocabulary: Vocabulary, files: Sequence[Path], make) -> list[Path]:
    if not files:
        return []
    folder = _cached_folder(cache, vocabulary, files, make.__name__, make)
    return sorted(folder.glob("*.bin"))


def _cached_folder(
    cache: Path, vocabulary: Vocabulary, files: Sequence[Path], how: str, make
) -> Path:
    """The folder of what `make` gives for these files, made unless it is there."""
    digest = hashlib.sha256(f"{_VERSION} {how} {vocabulary.header(0)}".encode())
    for path in files:
        status = path.stat()
        digest.update(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode())
    folder = cache / digest.hexdigest()[:16]
    if not folder.is_dir():
        with _appearing(folder) as empty:
            make(files, vocabulary, empty)
    return folder


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """An empty folder that becomes `folder` when the block ends well, and vanishes otherwise."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield making
        os.replace(making, folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)
