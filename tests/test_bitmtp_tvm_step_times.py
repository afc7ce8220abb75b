"""t(W): the file beside the manifest, and the card's guess."""

import json

import pytest
from model_manifest import DEMO, model

from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.step_times import (
    GRAPH,
    LAUNCHES,
    STEP_TIMES,
    Timing,
    identity,
    kv_bytes,
    predict,
    read_step_times,
    row_multiplications,
    write_step_times,
)

MANIFEST = model("h200")
TIMINGS = {
    GRAPH: {w: Timing(0.5 + w / 100, 0.4, 0.9) for w in MANIFEST.widths},
    LAUNCHES: {w: Timing(1.5 + w / 100, 1.4, 1.9) for w in MANIFEST.widths},
}
FACTS = {"device": "NVIDIA H200", "driver": "580.1", "context_fill": 512}


def test_what_is_written_is_read_back(tmp_path):
    written = write_step_times(tmp_path, MANIFEST, TIMINGS, FACTS)
    assert written == read_step_times(tmp_path, MANIFEST)
    assert written.measured
    assert written.milliseconds == {1: 0.51, 2: 0.52, 4: 0.54, 8: 0.58, 16: 0.66}
    assert FACTS.items() <= written.provenance.items()
    assert [path.name for path in tmp_path.iterdir()] == [STEP_TIMES]
    record = json.loads((tmp_path / STEP_TIMES).read_text())
    assert record["milliseconds"][LAUNCHES]["16"] == [1.66, 1.4, 1.9]
    assert record["artifact"] == identity(MANIFEST)


def test_without_graphs_the_launched_steps_count(tmp_path):
    write_step_times(tmp_path, MANIFEST, {LAUNCHES: TIMINGS[LAUNCHES]}, {})
    times = read_step_times(tmp_path, MANIFEST)
    assert times.milliseconds[1] == 1.51


def test_nothing_was_measured(tmp_path):
    assert read_step_times(tmp_path, MANIFEST) is None


def test_times_of_another_artifact_are_refused(tmp_path):
    write_step_times(tmp_path, MANIFEST, TIMINGS, FACTS)
    with pytest.raises(BitMTPError, match=r"t_w\.json was measured for another artifact: remove"):
        read_step_times(tmp_path, model("h100"))


def edited(tmp_path, **changes):
    write_step_times(tmp_path, MANIFEST, TIMINGS, FACTS)
    path = tmp_path / STEP_TIMES
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "format version 2, not 1"),
        ({"milliseconds": None}, "no milliseconds"),
        ({"milliseconds": {}}, "no milliseconds"),
        ({"milliseconds": {GRAPH: [1]}}, "no time of width 1"),
        ({"milliseconds": {GRAPH: {}}}, "no time of width 1"),
        ({"milliseconds": {GRAPH: {"1": [10**400]}}}, "the time of width 1 is 1000000000"),
        ({"milliseconds": {GRAPH: {"1": 0.5}}}, "no time of width 1"),
        ({"milliseconds": {GRAPH: {"1": []}}}, "no time of width 1"),
        ({"milliseconds": {GRAPH: {"1": [True]}}}, "no time of width 1"),
        ({"milliseconds": {GRAPH: {"1": ["0.5"]}}}, "no time of width 1"),
        ({"milliseconds": {GRAPH: {"1": [0]}}}, "the time of width 1 is 0"),
        ({"milliseconds": {GRAPH: {"1": [float("nan")]}}}, "the time of width 1 is nan"),
        ({"milliseconds": {GRAPH: {"1": [float("inf")]}}}, "the time of width 1 is inf"),
        ({"milliseconds": {GRAPH: {"1": [0.5]}}}, "no time of width 2"),
    ],
)
def test_damage_is_named(tmp_path, changes, message):
    edited(tmp_path, **changes)
    with pytest.raises(BitMTPError, match=rf"is damaged \({message}.*\): remove it, or measure"):
        read_step_times(tmp_path, MANIFEST)


@pytest.mark.parametrize("text", [b"", b"[]", b"\xff", b"{", b"[" * 100_000])
def test_a_file_that_is_none_of_ours(tmp_path, text):
    (tmp_path / STEP_TIMES).write_bytes(text)
    with pytest.raises(BitMTPError, match="is damaged"):
        read_step_times(tmp_path, MANIFEST)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(BitMTPError, match=r"gone/t_w\.json cannot be written: No such file"):
        write_step_times(tmp_path / "gone", MANIFEST, TIMINGS, FACTS)


def test_what_fails_half_way_leaves_the_old_file(tmp_path):
    write_step_times(tmp_path, MANIFEST, TIMINGS, FACTS)
    before = (tmp_path / STEP_TIMES).read_bytes()
    with pytest.raises(TypeError):
        write_step_times(tmp_path, MANIFEST, TIMINGS, {"device": object()})
    assert (tmp_path / STEP_TIMES).read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_rows_and_tokens_are_counted():
    # 521 MB at four weights a byte, and the head.
    assert row_multiplications(MANIFEST) == 2_084_044_800 + 128256 * 2560
    assert kv_bytes(MANIFEST, 512) == 512 * 30 * 2 * 5 * 128 * 2


@pytest.mark.parametrize(
    ("manifest", "measured"),
    [
        (MANIFEST, {1: 1.07, 2: 1.09, 4: 1.34, 8: 1.46, 16: 1.64}),
        (model("cpu", DEMO, 24_475_152), {1: 1.11, 2: 1.49, 4: 2.37, 8: 4.46, 16: 8.96}),
    ],
    ids=["h200", "cpu"],
)
def test_the_guess_is_near_what_was_measured_once(manifest, measured):
    times = predict(manifest)
    assert not times.measured and tuple(times.milliseconds) == manifest.widths
    for width, milliseconds in measured.items():
        assert times.milliseconds[width] == pytest.approx(milliseconds, rel=0.2)


@pytest.mark.parametrize("target", ["h200", "3090", "orin-nano", "cpu", "cpu-aarch64"])
def test_wider_steps_are_never_guessed_to_be_quicker(target):
    times = list(predict(model(target, widths=(1, 4, 16, 64))).milliseconds.values())
    assert times == sorted(times) and times[0] > 0


def test_a_smaller_card_is_guessed_to_be_slower():
    large, small = (predict(model(name)).milliseconds for name in ("h200", "orin-nano"))
    # 68 instead of 4800 GB a second.
    assert small[1] > 10 * large[1]
    assert predict(model("orin-nano")).provenance["predicted_for"] == "orin-nano"
