"""The modes side by side: a fair comparison, and the loops that would flatter it."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fake_model import FakeModel, hashed, right
from lost_signal import Losing, ended_at_once
from model_manifest import model
from twin_session import CHEAP_ROWS, TwinSession, mtp_of

from bitmtp_tvm import bench as command
from bitmtp_tvm import bench_modes
from bitmtp_tvm import engine as engine_module
from bitmtp_tvm.engine import Engine, Parts
from bitmtp_tvm.mode_rows import (
    Setting,
    common,
    compare,
    equal,
    host_gap,
    loops,
    settings,
    summary,
    table,
)
from bitmtp_tvm.step_times import StepTimes


def test_settings_are_those_that_a_mode_reads():
    found = settings((4, 8), ("auto", "chain"))
    assert found[:3] == [Setting("ar"), Setting("confidence", 4), Setting("confidence", 8)]
    assert found[3:5] == [Setting("speculative", 4, "auto"), Setting("speculative", 4, "chain")]
    assert len(found) == 11 and len(set(found)) == 11


def test_equality_is_counted_place_by_place():
    assert equal([1, 2, 3, 4], [1, 9, 3]) == 2 and common([1, 2, 3, 4], [1, 9, 3]) == 1
    assert equal([], [1]) == common([], [1]) == 0
    assert common([1, 2], [1, 2, 3]) == 2


@pytest.mark.parametrize(
    ("tokens", "looping"),
    [
        (list(range(48)), False),
        ([7] * 48, True),
        ([7] * 47, False),
        (list(range(100)) + [1, 2, 3] * 16, True),
        (list(range(100)) + [1, 2, 3] * 15 + [1, 2, 4], False),
        (list(range(24)) * 3, True),
        (list(range(25)) * 3, False),
    ],
)
def test_a_text_that_repeats_itself_is_a_loop(tokens, looping):
    assert loops(tokens) == looping


def test_the_host_gap_is_what_steps_do_not_explain():
    times = StepTimes({1: 2.0, 8: 4.0}, measured=True)
    assert host_gap({1: 10, 8: 20}, 0.125, times) == pytest.approx(0.2)
    assert host_gap({1: 10}, 0.125, replace(times, measured=False)) is None
    assert host_gap({1: 10}, 0.125, None) is None
    assert host_gap({}, 0.0, times) is None


def fake_engine(monkeypatch, **fake):
    session = TwinSession(FakeModel(200, **fake), depth=2)
    parts = Parts(session, None, frozenset(), CHEAP_ROWS, mtp_of(session.model))
    monkeypatch.setattr(engine_module, "open_parts", lambda directory, progress, graph: parts)
    return Engine("somewhere"), session


PROMPTS = [[1, 2, 3], [4, 5]]


def test_every_mode_is_compared_with_ar(monkeypatch):
    engine, session = fake_engine(monkeypatch, quality=hashed(5, 0.8))
    wanted = settings((8,), ("chain", "outcomes"))
    found = compare(engine, PROMPTS, wanted, 40, CHEAP_ROWS)
    assert [row.setting for row in found.every] == wanted
    by_mode = {row.setting: row for row in found.every}
    plain = by_mode[Setting("ar")]
    assert plain.tokens == plain.forwards == 80 and plain.drafts_right is None
    assert plain.equal == plain.prefix == plain.tokens_per_forward == 1
    for layout in ("chain", "outcomes"):
        row = by_mode[Setting("speculative", 8, layout)]
        assert row.equal == row.prefix == 1 and row.tokens == 80
        assert row.tokens_per_forward > 1.5 and 0.3 < row.drafts_right < 1
        assert sum(row.steps.values()) >= row.forwards
    trusting = by_mode[Setting("confidence", 8)]
    assert 0 <= trusting.prefix <= trusting.equal < 1
    assert found.looping == [False, False]
    assert [row.tokens for row in found.calm] == [row.tokens for row in found.every]
    # Each prompt is computed whole, none profits from the one before.
    assert session.calls.count("prefill 0+2") == 2 * len(wanted)


def test_a_ctrl_c_that_was_lost_ends_the_comparison(monkeypatch):
    engine, _ = fake_engine(monkeypatch)
    losing = Losing(engine.reset)
    monkeypatch.setattr(engine, "reset", losing)
    assert ended_at_once(lambda: compare(engine, PROMPTS, [Setting("ar")], 8, None), losing)


def test_texts_that_loop_are_left_out_of_the_second_table(monkeypatch):
    script = {place: 7 for place in range(3, 200)}
    engine, _ = fake_engine(monkeypatch, quality=right, script=script)
    found = compare(engine, [[1, 2, 3]], settings((8,), ("auto",)), 60, None)
    assert found.looping == [True]
    assert [row.tokens for row in found.calm] == [0] * 4
    assert found.every[2].tokens_per_forward > 3 and found.every[2].host_gap is None
    assert found.to_dict()["looping"] == 1


def stats(**changes):
    fields = {"new_tokens": 0, "forwards": 0, "decode_seconds": 0.0, "steps": {}, "evaluated": []}
    found = SimpleNamespace(**{**fields, "accepted": [], "tokens_per_second": 0.0, **changes})
    return found


def test_a_row_adds_its_prompts_up():
    runs = [
        SimpleNamespace(
            token_ids=[1, 2, 3, 4],
            stats=stats(
                new_tokens=4,
                forwards=2,
                decode_seconds=0.5,
                steps={1: 1, 8: 2},
                evaluated=[2, 1],
                accepted=[1, 0],
                tokens_per_second=8.0,
            ),
        ),
        SimpleNamespace(
            token_ids=[5, 6],
            stats=stats(
                new_tokens=2,
                forwards=1,
                decode_seconds=0.25,
                steps={8: 1},
                evaluated=[1],
                accepted=[1],
                tokens_per_second=8.0,
            ),
        ),
    ]
    times = StepTimes({1: 100.0, 8: 150.0}, measured=True)
    row = summary(Setting("hybrid", 8), runs, [[1, 2, 9, 4], [5, 6, 7]], times)
    assert (row.tokens, row.forwards, row.seconds, row.steps) == (6, 3, 0.75, {1: 1, 8: 3})
    assert row.equal == 5 / 7 and row.prefix == 4 / 7
    assert row.drafts_right == 0.5
    assert row.host_gap == pytest.approx(1 - 0.55 / 0.75)
    shown = row.to_dict()
    assert shown["tokens_per_second"] == 8 and shown["tokens_per_forward"] == 2
    assert (shown["mode"], shown["block_size"], shown["layout"]) == ("hybrid", 8, "auto")
    plain = replace(row, setting=Setting("ar"), seconds=1.5, drafts_right=None, host_gap=None)
    first, second = table([plain, row])[1:]
    assert first.split() == "ar 2.00 4.0 (8-8) 1.00x 0.714 0.571 - -".split()
    assert second.split() == "hybrid 8 auto 2.00 8.0 (8-8) 2.00x 0.714 0.571 50 % 27 %".split()


@pytest.fixture
def modes(monkeypatch, tmp_path, capsys):
    """`bench --modes` over the twin session."""

    def run(*arguments, mtp=True):
        manifest = model("cpu")
        session = TwinSession(FakeModel(200, quality=hashed(5, 0.8)), depth=2)
        config = {**manifest.config, "mtp": mtp_of(session.model) if mtp else None}
        found = SimpleNamespace(manifest=replace(manifest, config=config, widths=session.widths))
        monkeypatch.setattr(bench_modes, "open_artifact", lambda directory: found)
        monkeypatch.setattr(bench_modes, "PROMPTS", ([1, 2, 3], [4, 5]))
        parts = Parts(session, None, frozenset(), CHEAP_ROWS, config["mtp"])
        monkeypatch.setattr(engine_module, "open_parts", lambda directory, progress, graph: parts)
        code = command.main(["--artifact", "somewhere", "--modes", *arguments])
        return code, *capsys.readouterr()

    return run


def test_modes_are_printed_and_the_last_line_is_json(modes):
    code, out, err = modes("--max-new-tokens", "12")
    assert (code, err) == (0, "")
    report = json.loads(out.splitlines()[-1])
    names = [(row["mode"], row["block_size"]) for row in report["rows"]]
    assert names == [
        ("ar", None),
        ("confidence", 4),
        ("confidence", 8),
        ("speculative", 4),
        ("speculative", 8),
        ("hybrid", 4),
        ("hybrid", 8),
    ]
    assert {row["tokens"] for row in report["rows"]} == {24}
    assert report["max_new_tokens"] == 12 and report["prompts"] == 2
    assert "no text ends in a loop" in out


@pytest.mark.parametrize(
    ("arguments", "mtp", "message"),
    [
        ((), False, "somewhere was trained without multi-token prediction: ar is its only mode"),
        (("--block-sizes", "9"), True, "block_size is 9 and the model was trained with blocks of"),
        (("--prompts", "/nowhere"), True, "/nowhere cannot be read"),
    ],
)
def test_what_cannot_be_compared_is_refused(modes, arguments, mtp, message):
    code, out, err = modes(*arguments, mtp=mtp)
    assert code in (1, 2) and out == ""
    assert err.startswith(f"error: {message}")


def test_prompts_of_a_file_need_a_tokenizer(modes, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text('"hello"\n')
    code, _, err = modes("--prompts", str(path))
    assert code == 2 and err.startswith(f"error: {path}, line 1: this artifact has no tokenizer")
