"""`bench --kernels`: what a kernel is said to move, and what the table adds up to."""

from types import SimpleNamespace

import numpy as np
import pytest
from model_manifest import model

from bitmtp_tvm import bench as command
from bitmtp_tvm.bench_kernels import Row, buckets, collect, lines, moved_bytes, shown, time_bucket
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


def test_every_bucket_is_measured():
    names = [name for name, _, _ in buckets(model("h200", widths=(1, 8)))]
    assert names == ["step_w1", "step_w8", "prefill_w128", "prefill_w512"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--kernels", "--plot", "x.png"], "--plot goes with --steps"),
        (["--kernels", "--prompts", "x"], "--prompts goes with --modes"),
        (["--modes", "--fill", "4"], "--fill goes with --steps and --kernels"),
    ],
)
def test_options_go_with_what_they_are_about(arguments, sentence, capsys):
    assert command.main(["--artifact", "nowhere", *arguments]) == 2
    assert sentence in capsys.readouterr().err
