"""Tuning records on disk: what is written, what is read back, and what is refused."""

import json
from dataclasses import replace

import pytest

from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.records import (
    DEVICE,
    TEMPLATES,
    DeviceInfo,
    Key,
    Record,
    Records,
    tuning_folder,
)
from schedules.space import LARGE_CARD
from schedules.workload import Workload

KEY = Key("low_bit_linear", "bitnet-ternary", 3840, 2560, 8, False, True)
RECORD = Record(KEY, "low_bit_mma", {"warps": 4, "row_tiles": 2}, 5e-6, "measured", "h200")
INFO = DeviceInfo("h200", "NVIDIA H200", "9.0", 132, clock_mhz=1980, power_limit_w=700)


def filled(*records):
    found = Records.read(tuning_folder("nowhere"))
    for record in records:
        found.put([record])
    return found


def test_the_key_of_a_linear_names_its_matrix():
    work = Workload(
        "low_bit_linear",
        {"format": "bitnet-ternary", "residual": True},
        ((8, 2560), (8,), (8,), (40, 20, 32, 4), (1,), (8, 640), (8, 640)),
        ("int8", "float32", "int32", "uint32", "float32", "float32", "float32"),
    )
    key = Key.of(work, replace(LARGE_CARD, overlaps=False))
    assert key == Key("low_bit_linear", "bitnet-ternary", 640, 2560, 8, True, False)
    plain = Workload("greedy", {}, ((4, 100), (4,), (4,)), ("float32", "int32", "int32"))
    assert Key.of(plain, LARGE_CARD) == Key("greedy", "", 0, 100, 4, False, True)


def test_records_come_back_as_they_were_one_a_line_and_in_order(tmp_path):
    wider = replace(RECORD, key=replace(KEY, width=16), seconds=None, provenance="rule", source="")
    records = filled(wider, RECORD)
    records.put([RECORD, replace(RECORD, template="low_bit_gemv", seconds=9e-6)])
    records.write(tmp_path, INFO)
    read = Records.read(tmp_path)
    assert read.by_key == records.by_key
    assert read.device == INFO
    assert [record.template for record in read.of(KEY)] == ["low_bit_mma", "low_bit_gemv"]
    assert read.of(replace(KEY, width=3)) == []
    text = (tmp_path / TEMPLATES).read_text()
    lines = [line for line in text.splitlines() if "template" in line]
    assert [json.loads(line.rstrip(","))["key"]["width"] for line in lines] == [8, 8, 16]
    assert {path.name for path in tmp_path.iterdir()} == {TEMPLATES, DEVICE}
    # Equal records give equal text, in whatever order they were put.
    filled(RECORD).write(tmp_path / "a", None)
    filled(RECORD).write(tmp_path / "b", None)
    assert (tmp_path / "a" / TEMPLATES).read_text() == (tmp_path / "b" / TEMPLATES).read_text()
    assert not (tmp_path / "a" / DEVICE).exists()


def test_attention_goes_by_the_weights_around_it_where_they_are_known():
    plain = Key("attention_parts", "", 65536, 2048, 1, False, True)
    binary = replace(plain, format="binary-g128")
    records = filled(replace(RECORD, key=plain), replace(RECORD, key=binary, template="other"))
    assert records.of(binary)[0].template == "other"
    assert records.of(replace(plain, format="ternary-g128"))[0].template == "low_bit_mma"
    # What was found beside one kind of weights says nothing about any.
    assert filled(replace(RECORD, key=binary)).of(plain) == []


def test_the_attention_of_binary_weights_has_records_of_its_own():
    """Of one row 32 blocks a head, where ternary weights of the same shapes go with 16."""
    records = Records.read(tuning_folder("h200"))
    key = Key("attention_parts", "binary-g128", 65536, 2048, 1, False, True)
    splits = [records.of(replace(key, format=f"{f}-g128"))[0] for f in ("binary", "ternary")]
    assert [record.arguments["splits"] for record in splits] == [32, 16]


def test_a_folder_without_files_has_no_records(tmp_path):
    found = Records.read(tmp_path / "none")
    assert (found.by_key, found.device) == ({}, None)


def test_pruning_keeps_the_winner_and_the_range_of_the_others():
    others = [replace(RECORD, template=f"t{i}", seconds=i * 1e-6) for i in range(9, 1, -1)]
    records = filled(RECORD)
    # The chain decided: the winner is not the fastest alone.
    records.put([RECORD, *others])
    records.prune(4)
    kept = records.of(KEY)
    assert kept[0] == RECORD
    assert [record.template for record in kept[1:]] == ["t2", "t5", "t9"]
    records.prune(1)
    assert records.of(KEY) == [RECORD]


def test_what_is_put_is_of_one_key_and_makes_sense():
    records = filled()
    with pytest.raises(ValueError, match="one key"):
        records.put([RECORD, replace(RECORD, key=replace(KEY, width=1))])
    with pytest.raises(ValueError, match="no time"):
        records.put([replace(RECORD, seconds=None)])
    assert not records.by_key


def damage(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (TEMPLATES, {"format_version": 2}, "format version 2 instead of 1"),
        (TEMPLATES, {"records": {}}, "no list of records"),
        (TEMPLATES, {"extra": 1}, "no list of records"),
        (DEVICE, {"format_version": None}, "format version None instead of 1"),
        (DEVICE, {"multiprocessors": "132"}, "wrong type of device.multiprocessors"),
        (DEVICE, {"colour": "green"}, "unknown field device.colour"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path, name, change, words):
    filled(RECORD).write(tmp_path, INFO)
    damage(tmp_path / name, lambda data: data.update(change))
    with pytest.raises(BitMTPError, match=words) as fault:
        Records.read(tmp_path)
    assert name in str(fault.value)
    assert "tune again" in str(fault.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"arguments": {"warps": "4"}}, "record 1: wrong type of record.arguments.warps"),
        ({"arguments": {"warps": True}}, "wrong type of record.arguments.warps"),
        ({"seconds": -1.0}, "a time is not positive"),
        ({"seconds": float("nan")}, "a time is not positive"),
        ({"seconds": None}, "measured and has no time"),
        ({"provenance": "guessed"}, "the provenance 'guessed' is unknown"),
        ({"source": ""}, "names no source"),
        ({"key": {"op": "head"}}, "missing or unknown field record.key"),
        ({"template": None}, "wrong type of record.template"),
    ],
)
def test_a_record_that_makes_no_sense_is_named(tmp_path, change, words):
    filled(RECORD).write(tmp_path, None)
    damage(tmp_path / TEMPLATES, lambda data: data["records"][0].update(change))
    with pytest.raises(BitMTPError, match=words):
        Records.read(tmp_path)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
@pytest.mark.parametrize("name", [TEMPLATES, DEVICE])
def test_what_is_no_json_object_is_named(tmp_path, name, text):
    (tmp_path / name).write_bytes(text)
    with pytest.raises(BitMTPError, match=name):
        Records.read(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BitMTPError, match="cannot be written"):
        filled(RECORD).write(tmp_path / "file", None)


def test_every_folder_that_ships_can_be_read():
    for folder in tuning_folder("").iterdir():
        if folder.is_dir() and not folder.name.startswith("_"):
            assert Records.read(folder).folder == folder
