"""`bench --kernels`: what a kernel is said to move, and what the table adds up to."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from lost_signal import Losing, ended_at_once
from model_manifest import model

from bitmtp_tvm import bench as command
from bitmtp_tvm.bench_kernels import (
    Row,
    buckets,
    collect,
    lines,
    moved_bytes,
    read_report,
    shown,
    time_bucket,
)
from bitmtp_tvm.errors import UsageError
from bitmtp_tvm.manifest import KernelRecord
from bitmtp_tvm.timing import HostTimer

FILL = 512


def tensor(shape, dtype):
    return SimpleNamespace(shape=shape, dtype=dtype)


ROWS = (tensor((4, 2560), "int8"), "")
OUT = (tensor((4, 3840), "float32"), "")
WEIGHT = (tensor((240, 20, 32, 4), "uint32"), "layers_0_qkv_weight")
TABLE = (tensor((128256, 2560), "uint16"), "embed_weight")


@pytest.mark.parametrize(
    ("op", "arguments", "moved"),
    [
        ("low_bit_linear", [ROWS, WEIGHT, OUT], 4 * 2560 + 3840 * 2560 // 4 + 4 * 3840 * 4),
        ("embed", [(tensor((4,), "int32"), ""), TABLE, OUT], 16 + 4 * 3840 * 4),
        ("head", [ROWS, TABLE, OUT], 4 * 2560 + 128256 * 2560 * 2 + 4 * 3840 * 4),
    ],
)
def test_weights_are_read_and_tables_are_not(op, arguments, moved):
    assert moved_bytes(op, arguments, model("h200"), FILL) == moved


def test_of_a_cache_what_is_filled_is_read():
    manifest = model("h200")
    cache = (tensor(manifest.kv.shape, "float16"), "layers_3_kv_cache")
    filled = 2 * 5 * FILL * 128 * 2
    assert moved_bytes("attention_parts", [cache], manifest, FILL) == pytest.approx(
        filled, rel=0.01
    )
    assert moved_bytes("rope_kv_write", [cache], manifest, FILL) == 0


def test_a_bucket_is_summed_by_operation_beside_the_whole_step():
    rows = [
        Row("step_w1", "low_bit_linear_w1", "low_bit_linear", 30, 2e-6, 4_000_000),
        Row("step_w1", "low_bit_linear1_w1", "low_bit_linear", 30, 3e-6, 3_000_000),
        Row("step_w1", "head_w1", "head", 1, 100e-6, 300_000_000),
    ]
    text = "\n".join(lines(rows, {"step_w1": 220e-6}, 4000.0))
    assert "low_bit_linear 150.0, head 100.0" in text
    assert "kernels alone 250.0 us, the whole step 220.0 us" in text
    assert shown(rows[0], 4000.0) == {
        "bucket": "step_w1",
        "kernel": "low_bit_linear_w1",
        "op": "low_bit_linear",
        "count": 30,
        "us": 2.0,
        "bytes": 4_000_000,
        "gbs": 2000.0,
        "share": 0.5,
    }


class FakeSession:
    """A step of three layers, whose rows all stand in one buffer, as a planner would have it."""

    def __init__(self):
        self.manifest = SimpleNamespace(
            kernels=(KernelRecord("linear_w2", "low_bit_linear", "", 2, "rule"),),
            slots=64,
        )
        self.weights = [np.full((2, 2), i, np.float32) for i in range(3)]
        self.seen_by_kernel = []

    def copy_of(self, array):
        return array.copy()

    def observe(self, entry, width, start, seen):
        rows = np.ones((width, 2), np.float32)
        for i, weight in enumerate(self.weights):
            seen("linear_w2", self.kernel, [(rows, ""), (weight, f"layers_{i}_weight")])
        rows[:] = np.nan

    def kernel(self, rows, weight):
        self.seen_by_kernel.append((rows.copy(), weight))


def test_kernels_run_on_what_they_found_and_on_every_layer_s_weights():
    session = FakeSession()
    (found,) = collect(session, "step", 2, FILL).values()
    assert found.count == len(found.calls) == 3
    assert found.bytes == 2 * 2 * 4 + 2 * 2 * 4
    (row,) = time_bucket(session, HostTimer(), "step_w2", "step", 2, FILL)
    assert row.count == 3 and row.seconds > 0
    assert all((rows == 1).all() for rows, _ in session.seen_by_kernel)
    used = [id(weight) for _, weight in session.seen_by_kernel[:3]]
    assert used == [id(weight) for weight in session.weights]


def test_a_ctrl_c_that_was_lost_ends_the_table():
    session, timer = FakeSession(), HostTimer()
    session.manifest.kernels += (KernelRecord("norm_w2", "norm_quantize", "", 2, "rule"),)
    observe = session.observe

    def both(entry, width, start, seen):
        observe(entry, width, start, seen)
        seen("norm_w2", session.kernel, [(session.weights[0], "")] * 2)

    session.observe, timer.seconds = both, (losing := Losing(timer.seconds))
    assert ended_at_once(lambda: time_bucket(session, timer, "step_w2", "step", 2, FILL), losing)


def test_every_bucket_is_measured():
    names = [name for name, _, _ in buckets(model("h200", widths=(1, 8)))]
    assert names == ["step_w1", "step_w8", "prefill_w128", "prefill_w512"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--modes", "--plot", "x.png"], "--plot goes with --steps and --kernels"),
        (["--steps", "--before", "x.txt"], "--before goes with --kernels"),
        (["--kernels", "--prompts", "x"], "--prompts goes with --modes"),
        (["--modes", "--fill", "4"], "--fill goes with --steps and --kernels"),
    ],
)
def test_options_go_with_what_they_are_about(arguments, sentence, capsys):
    assert command.main(["--artifact", "nowhere", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_every_operation_has_a_part_of_the_bar():
    from bitmtp_tvm.plotting import part_of

    found = {
        op: part_of(op)
        for op in ("norm_low_bit_linear", "attention_join", "gated_norm_quantize", "head_rescore")
    }
    assert list(found.values()) == ["linears", "attention", "norms and codes", "head"]
    assert part_of("final_norm_codes") == "norms and codes"
    assert part_of("norm_rope_kv_write") == "RoPE and K/V" and part_of("accept") == "the rest"


def test_kernel_times_are_drawn_beside_an_earlier_report(tmp_path):
    pytest.importorskip("matplotlib")
    from bitmtp_tvm.plotting import draw_kernel_times

    rows = [Row(f"step_w{w}", "accept", "accept", 1, w * 1e-6, 10) for w in (16, 2)]
    kernels = [shown(row, 4000.0) for row in rows]
    report = {"bench": "kernels", "kernels": kernels, "whole_us": {"step_w16": 20, "step_w2": 3}}
    earlier = tmp_path / "earlier.txt"
    earlier.write_text("a table\n" + json.dumps(report) + "\n")
    before = read_report(earlier)
    assert before == report
    for name, one in (("alone.png", None), ("both.png", before)):
        draw_kernel_times(tmp_path / name, report, one, "title")
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text", ["", "no report", "[]", '{"bench": "steps"}', '{"bench": 1}'])
def test_what_is_no_report_is_refused(tmp_path, text):
    path = tmp_path / "earlier.txt"
    path.write_text(text)
    with pytest.raises(UsageError, match="does not end in a report"):
        read_report(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_report(tmp_path / "gone")
