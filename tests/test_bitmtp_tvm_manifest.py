import json
from pathlib import Path

import pytest
from tiny_artifact import manifest_for

from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.manifest import (
    MARKER,
    Manifest,
    MemoryPlan,
    Shard,
    allocated,
    embedded_manifest,
)
from bitmtp_tvm.targets import get_target

MANIFEST = manifest_for(get_target("orin"), (Shard("a", 12, "ff"), Shard("b", 3, "ee")))


def test_json_round_trip() -> None:
    text = MANIFEST.to_json()
    assert Manifest.from_json(text) == MANIFEST
    assert Manifest.from_json(text).to_json() == text
    assert json.loads(text)["memory"]["total"] == 6 << 20


def test_memory_plan_adds_up() -> None:
    assert MemoryPlan.of(1, 2, 4).total == 7


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format_version",), 1, "format version 1 instead of 4"),
        (("context",), "32", r"wrong type of manifest\.context"),
        (("context",), True, r"wrong type of manifest\.context"),
        (("widths",), [1, "2"], r"wrong type of manifest\.widths\[1\]"),
        (("kv",), None, r"wrong type of manifest\.kv"),
        (("memory", "extra"), 1, r"unknown field manifest\.memory\.extra"),
        (("shards",), {}, r"wrong type of manifest\.shards"),
        (("tokenizer", "bos_token_id"), "x", r"wrong type of manifest\.tokenizer\.bos"),
        (("versions", "tvm"), 27, r"wrong type of manifest\.versions\.tvm"),
    ],
)
def test_what_is_wrong_is_named(path: tuple[str, ...], value: object, message: str) -> None:
    data = json.loads(MANIFEST.to_json())
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        Manifest.from_json(json.dumps(data))


@pytest.mark.parametrize("name", sorted(json.loads(MANIFEST.to_json())))
def test_no_field_may_be_missing(name: str) -> None:
    data = json.loads(MANIFEST.to_json())
    del data[name]
    with pytest.raises(ValueError, match=name.split("_")[0]):
        Manifest.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "3", "{", MANIFEST.to_json()[:-30]])
def test_damaged_text_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        Manifest.from_json(text)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"\x7fELF....", "holds no manifest"),
        (b"..." + MARKER + b"cut sho", "holds no manifest"),
        (MARKER + b"{}\0" + MARKER + b"{}\0", "more than one manifest"),
        (MARKER + b"\xff\0", "is damaged"),
    ],
)
def test_libraries_without_one_whole_manifest(tmp_path, contents, message) -> None:
    path = tmp_path / "m.so"
    path.write_bytes(contents)
    with pytest.raises(BitMTPError, match=message):
        embedded_manifest(path)


def test_a_missing_library_is_named(tmp_path: Path) -> None:
    with pytest.raises(BitMTPError, match=r"none\.so cannot be read"):
        embedded_manifest(tmp_path / "none.so")


def test_allocations_of_a_gpu_are_counted_in_pages():
    page = 2 << 20
    assert allocated([page, page + 1, 3 * page], "cuda") == 6 * page
    assert allocated([page // 2], "cuda") == page
    assert allocated([100] * 1000, "cuda") == page
    assert allocated([], "cuda") == 0
    assert allocated([100, page + 1], "llvm") == page + 101
