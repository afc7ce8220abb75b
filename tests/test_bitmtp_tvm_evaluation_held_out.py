"""Held-out text: every kind of file, windows and prompts out of single documents."""

import json
import lzma
from pathlib import Path

import numpy as np
import pytest
from imports import ROOT

from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.evaluation.held_out import (
    Vocabulary,
    documents,
    prompts,
    read_held_out,
    windows,
)
from bitmtp_tvm.text import TextCodec

DEMO = ROOT / "bitmtp_tvm" / "assets" / "demo" / "tokenizer.json"
PLAIN = Vocabulary(100, None, 0, (1,))


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary(8192, TextCodec(DEMO, True, 0, 8192), 0, (1,))


def shard(path: Path, tokens, dtype="<u2") -> Path:
    data = np.array(tokens, dtype).tobytes()
    path.write_bytes(lzma.compress(data) if path.suffix == ".xz" else data)
    return path


def test_shards_are_read_one_after_the_other(tmp_path):
    paths = [shard(tmp_path / "a.bin", [0, 5, 6, 1]), shard(tmp_path / "b.bin.xz", [0, 7, 1])]
    found = read_held_out(paths, PLAIN)
    assert found.tolist() == [0, 5, 6, 1, 0, 7, 1] and found.dtype == np.int64
    assert read_held_out([], PLAIN).shape == (0,)


def test_wide_shards_are_those_of_large_vocabularies_or_say_so(tmp_path):
    path = shard(tmp_path / "a.bin", [0, 70000, 1], "<u4")
    assert read_held_out([path], Vocabulary(100000)).tolist() == [0, 70000, 1]
    shard(path, [0, 50, 1], "<u4")
    path.with_suffix(".json").write_text('{"dtype": "uint32"}')
    assert read_held_out([path], PLAIN).tolist() == [0, 50, 1]


def test_a_text_is_a_document(tmp_path, vocabulary):
    (tmp_path / "one.py").write_text("def f():\n")
    ids = vocabulary.codec.encode("def f():\n")
    assert ids[0] == 0
    assert read_held_out([tmp_path / "one.py"], vocabulary).tolist() == [*ids, 1]
    (tmp_path / "two.jsonl").write_text('"def f():\\n"\n\n{"text": "def f():\\n"}\n')
    assert read_held_out([tmp_path / "two.jsonl"], vocabulary).tolist() == [*ids, 1] * 2
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "folder" / "deep" / "b.py").write_text("def f():\n")
    (tmp_path / "folder" / "a.txt").write_text("def f():\n")
    (tmp_path / "folder" / "empty.md").write_text("")
    (tmp_path / "folder" / "picture.png").write_bytes(b"\x89")
    (tmp_path / "folder" / "package.py").mkdir()
    assert read_held_out([tmp_path / "folder"], vocabulary).tolist() == [*ids, 1] * 2


def test_a_mark_of_the_byte_order_is_no_text(tmp_path, vocabulary):
    (tmp_path / "marked.jsonl").write_bytes(b'\xef\xbb\xbf"def"\n')
    (tmp_path / "plain.jsonl").write_bytes(b'"def"\n')
    one, two = (read_held_out([tmp_path / f"{n}.jsonl"], vocabulary) for n in ("marked", "plain"))
    assert one.tolist() == two.tolist()


def test_a_header_of_something_else_is_named(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(4))
    (tmp_path / "a.json").write_text('{"dtype": ["uint16"]}')
    with pytest.raises(BitMTPError, match=r"a\.json: dtype is \['uint16'\]; known"):
        read_held_out([tmp_path / "a.bin"], PLAIN)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.bin", None, "cannot be read: No such file"),
        ("odd.bin", b"\0\0\0", "3 bytes, which is no whole number of uint16 tokens"),
        ("other.bin", b"\x64\0", "token id 100, outside the model's vocabulary of 100"),
        ("bad.bin.xz", b"no xz", "cannot be read: damaged"),
        ("half.bin.xz", lzma.compress(bytes(5000))[:40], "cannot be read: damaged"),
        ("text.py", b"x", "is text and the model has no tokenizer"),
        ("bad.jsonl", b'"a"\n{"b": 1}', "line 1|has no tokenizer"),
        ("empty", "folder", "holds no file that ends in .py, .txt"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, message):
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(BitMTPError, match=message) as fault:
        read_held_out([path], PLAIN)
    assert str(path) in str(fault.value) and "\n" not in str(fault.value)


def test_damaged_text_is_named(tmp_path, vocabulary):
    (tmp_path / "bad.jsonl").write_text('"a"\n{"b": 1}\n')
    with pytest.raises(BitMTPError, match="line 2: neither a JSON string nor an object"):
        read_held_out([tmp_path / "bad.jsonl"], vocabulary)
    (tmp_path / "bad.py").write_bytes(b"ab\xff")
    with pytest.raises(BitMTPError, match="is not UTF-8 at byte 2"):
        read_held_out([tmp_path / "bad.py"], vocabulary)
    shard(tmp_path / "a.bin", [1])
    (tmp_path / "a.json").write_text(json.dumps({"dtype": "float16"}))
    with pytest.raises(BitMTPError, match="dtype is 'float16'; known: uint16, uint32"):
        read_held_out([tmp_path / "a.bin"], PLAIN)


TOKENS = np.array([0, 10, 11, 12, 13, 14, 1, 0, 20, 1, 0, 30, 31, 32, 1])


def test_documents_begin_at_a_bos_or_behind_an_end():
    assert [part.tolist() for part in documents(TOKENS, PLAIN)] == [
        [0, 10, 11, 12, 13, 14, 1],
        [0, 20, 1],
        [0, 30, 31, 32, 1],
    ]
    found = documents(TOKENS, Vocabulary(100, None, None, (1,)))
    assert [len(part) for part in found] == [7, 3, 5]
    assert len(documents(TOKENS, Vocabulary(100))) == 1


def test_windows_lie_in_one_document():
    assert windows(TOKENS, 3, 99, 0, PLAIN).tolist() == [
        [0, 10, 11],
        [12, 13, 14],
        [0, 20, 1],
        [0, 30, 31],
    ]
    few = windows(TOKENS, 3, 2, 5, PLAIN).tolist()
    assert len(few) == 2 and few == windows(TOKENS, 3, 2, 5, PLAIN).tolist()
    assert {tuple(map(tuple, windows(TOKENS, 3, 2, s, PLAIN))) for s in range(9)} != {
        tuple(map(tuple, few))
    }
    with pytest.raises(UsageError, match="has no document of 8"):
        windows(TOKENS, 8, 1, 0, PLAIN)


def test_prompts_have_no_end_and_begin_as_prompts_do():
    assert prompts(TOKENS, 3, 99, 0, PLAIN) == [[0, 10, 11], [0, 12, 13, 14], [0, 30, 31]]
    bare = Vocabulary(100, None, None, (1,))
    assert prompts(TOKENS, 3, 99, 0, bare) == [[0, 10, 11], [12, 13, 14], [0, 30, 31]]
    with pytest.raises(UsageError, match="to take a prompt from"):
        prompts(TOKENS, 7, 1, 0, PLAIN)
