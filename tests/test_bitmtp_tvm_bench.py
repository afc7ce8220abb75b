"""The bench: steps that are really full, a clock that counts the device alone, fair comparisons."""

import json
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fake_model import FakeModel, right
from lost_signal import Losing, ended_at_once
from model_manifest import model
from safetensors.numpy import save_file
from twin_session import TwinSession

from bitmtp_tvm import bench as command
from bitmtp_tvm import bench_steps, device_state, plotting
from bitmtp_tvm.bench_steps import table, tensor_bytes, weight_bytes
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.manifest import Shard
from bitmtp_tvm.step_times import GRAPH, LAUNCHES, Timing, read_step_times
from bitmtp_tvm.step_timing import (
    Bench,
    check_fill,
    full_state,
    measure_steps,
    measure_width,
)
from relax_models.state import Word

MILLISECONDS = {1: 20.0, 4: 24.0, 16: 40.0}
WIDTHS = tuple(MILLISECONDS)


class TimedSession(TwinSession):
    """A device whose steps take MILLISECONDS, and a host that needs `host` more for each call."""

    def __init__(self, depth=1, host=0.0, context=256, **quality):
        fake = FakeModel(context, block_size=63, **quality)
        super().__init__(fake, widths=WIDTHS, chunks=(1, 2), depth=depth)
        self.now, self.host = 0.0, host
        self._busy_until = 0.0
        self._ends = deque()

    def clock(self):
        return self.now

    def run(self, width, steps):
        super().run(width, steps)
        self.now += self.host
        work = steps * MILLISECONDS[width] / 1000
        self._busy_until = max(self.now, self._busy_until) + work
        self._ends.append(self._busy_until)
        if self.depth == 1:
            self.now = self._busy_until

    def read(self):
        self.now = max(self.now, self._ends.popleft())
        return super().read()


@pytest.mark.parametrize("width", [1, 2, 7, 16, 64])
def test_every_row_is_in_use_and_every_step_commits_one_token(width):
    session = TwinSession(FakeModel(128, block_size=63, quality=right), widths=(width,))
    session.prefill([1, 2, 3], 0)
    session.write(full_state(width, 4, 128, session.model.mask_token))
    for steps in range(1, 6):
        session.run(width, 1)
        state, _ = session.read()
        assert state[Word.ROW_PENDING] == 1 and state[Word.ROW_MASKS] == width - 1
        assert state[Word.LENGTH] == 4 + steps == 4 + state[Word.FORWARDS]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_device_is_timed_and_not_the_host(depth):
    session = TimedSession(depth, host=0.001 * (depth - 1))
    bench = Bench(40, session.model.mask_token, session.clock)
    times = measure_steps(session, bench)
    assert {width: time.median for width, time in times.items()} == pytest.approx(MILLISECONDS)
    assert times[16].low == pytest.approx(40) and times[16].high == pytest.approx(40)
    # The context never grows beyond what the steps have room in.
    assert session.state[Word.LENGTH] < session.context
    assert session.calls[0] == "prefill 0+39"


def test_a_ctrl_c_that_was_lost_ends_the_measurement():
    session = TimedSession()
    session.read = losing = Losing(session.read)
    bench = Bench(20, session.model.mask_token, clock=session.clock)
    assert ended_at_once(lambda: measure_steps(session, bench), losing)


def test_steps_that_stop_doing_anything_are_no_measurement():
    session = TimedSession(script={45: -1})
    session.prefill([1] * 39, 0)
    with pytest.raises(BitMTPError, match="no finite logit while steps were measured"):
        measure_width(session, 4, Bench(40, session.model.mask_token, session.clock))


def test_rows_that_do_not_run_are_found_out():
    class Narrow(TimedSession):
        def write(self, state, seen=None):
            state = state.copy()
            state[Word.MASKS] -= 1
            super().write(state, seen)

    session = Narrow()
    session.prefill([1] * 39, 0)
    with pytest.raises(BitMTPError, match="a step of 4 rows ran 3, and "):
        measure_width(session, 4, Bench(40, session.model.mask_token, session.clock))


def test_the_context_must_have_room():
    session = TimedSession(context=64)
    assert check_fill(session, 41) == 41
    with pytest.raises(UsageError, match="with 42 tokens of context: give --fill 1 to 41"):
        check_fill(session, 42)
    with pytest.raises(UsageError, match="a context of 20 tokens is too short"):
        check_fill(TimedSession(context=20), 1)
    fills = [check_fill(TimedSession(context=n), None) for n in (300, 1024, 4096)]
    assert fills == [150, 512, 512]
    # Half of it would leave too little room behind.
    assert check_fill(session, None) <= 41 and check_fill(TimedSession(context=50), None) >= 1


def test_a_whole_context_can_be_measured_in():
    """With the least room there are still enough chunks for a median."""
    session = TimedSession(2, context=64)
    times = measure_steps(session, Bench(41, session.model.mask_token, session.clock))
    assert times[16].median == pytest.approx(40)


def artifact(tmp_path, **tensors):
    save_file(tensors, tmp_path / "params-00001.safetensors")
    size = (tmp_path / "params-00001.safetensors").stat().st_size
    shard = Shard("params-00001.safetensors", size, "ff")
    manifest = replace(model("cpu", widths=WIDTHS), shards=(shard,), context=256)
    return SimpleNamespace(directory=tmp_path, manifest=manifest)


def test_an_embedding_apart_from_the_head_is_not_read_whole(tmp_path):
    embed, head = np.zeros((8, 4), np.uint16), np.zeros((8, 4), np.uint16)
    tied = artifact(tmp_path, **{"embed.weight": embed, "layers.0.o.weight": np.zeros(3, np.int8)})
    assert weight_bytes(tied) == 64 + 3
    untied = artifact(tmp_path, **{"embed.weight": embed, "head.weight": head})
    assert weight_bytes(untied) == 64
    assert tensor_bytes(tmp_path / "params-00001.safetensors") == {
        "embed.weight": 64,
        "head.weight": 64,
    }


def test_shards_that_cannot_be_read_are_named(tmp_path):
    path = tmp_path / "params-00001.safetensors"
    for contents in (None, b"", b"\x02\0\0\0\0\0\0\0[]", b"\x02\0\0\0\0\0\0\0{]"):
        if contents is not None:
            path.write_bytes(contents)
        with pytest.raises(BitMTPError, match="safetensors cannot be read: "):
            tensor_bytes(path)


FLOOR = {"floor_ms": 0.25, "weight_bytes": 10**9, "kv_bytes": 2 * 10**8, "data_sheet_gbs": 4800}


def test_the_table_has_a_line_a_bucket_and_the_share_of_the_data_sheet():
    timings = {GRAPH: {1: Timing(0.5, 0.4, 0.6)}, LAUNCHES: {1: Timing(2.5, 2.4, 2.6)}}
    head, line = table(timings, FLOOR)
    assert head.split("  ")[0] == "rows" and head.count("of data sheet") == 2
    assert line.split()[1:6] == "0.500 ms (0.400-0.600) 50 %".split()
    assert line.split()[6:] == "2.500 ms (2.400-2.600) 10 %".split()
    unknown = {**FLOOR, "floor_ms": None}
    head, line = table({LAUNCHES: {1: Timing(100.0, 90.0, 110.0)}}, unknown)
    assert "GB/s" in head and line.split()[-1] == "12.0"


@pytest.fixture
def steps(monkeypatch, tmp_path, capsys):
    """`bench --steps` over the twin session; gives (exit code, stdout, stderr)."""
    found = artifact(tmp_path, **{"embed.weight": np.zeros((8, 4), np.uint16)})
    monkeypatch.setattr(bench_steps, "open_artifact", lambda directory: found)
    monkeypatch.setattr(bench_steps, "check_device", lambda artifact: None)

    def open_session(artifact, progress, graph):
        session = TimedSession()
        monkeypatch.setattr(bench_steps, "Bench", lambda fill, mask: Bench(fill, 49, session.clock))
        return session

    monkeypatch.setattr(bench_steps, "Session", open_session)

    def run(*arguments):
        return command.main(["--artifact", str(tmp_path), "--steps", *arguments]), *(
            capsys.readouterr()
        )

    run.manifest = found.manifest
    return run


def test_measured_steps_are_printed_and_kept(steps, tmp_path):
    code, out, err = steps("--fill", "40")
    assert (code, err) == (0, "")
    report = json.loads(out.splitlines()[-1])
    assert report["milliseconds"]["launches"]["16"] == pytest.approx([40, 40, 40])
    assert report["bench"] == "steps" and report["context_fill"] == 40
    assert report["device"] and report["date"] and report["versions"]["tvm"]
    assert (
        report["command"] == f"python -m bitmtp_tvm.bench --artifact {tmp_path} --steps --fill 40"
    )
    times = read_step_times(tmp_path, steps.manifest)
    assert times.measured and times.milliseconds == pytest.approx(MILLISECONDS)
    assert times.provenance["device"] == report["device"]
    assert f"kept in {tmp_path}/t_w.json" in out


def test_measured_steps_can_be_drawn(steps, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "t.png"
    assert steps("--fill", "40", "--plot", str(picture))[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_both_ways_to_run_steps_are_drawn_side_by_side(tmp_path):
    pytest.importorskip("matplotlib")
    timings = {how: {1: Timing(1, 0.9, 1.2), 2: Timing(2, 2, 2)} for how in (GRAPH, LAUNCHES)}
    plotting.draw_step_times(tmp_path / "t.png", timings, "title", 0.25)
    size = np.frombuffer((tmp_path / "t.png").read_bytes()[16:24], ">u4")
    assert size.tolist() == [1280, 672]
    with pytest.raises(BitMTPError, match=r"t\.png cannot be written: No such file"):
        plotting.draw_step_times(tmp_path / "gone" / "t.png", timings, "title", None)


def test_a_picture_that_could_not_be_written_is_refused(tmp_path):
    pytest.importorskip("matplotlib")
    plotting.check_picture(tmp_path / "t.PNG")
    for name in ("t", "t.docx"):
        with pytest.raises(UsageError, match=f"{name} names no kind of picture: let it end in"):
            plotting.check_picture(tmp_path / name)
    with pytest.raises(UsageError, match="gone is not there: make the folder first"):
        plotting.check_picture(tmp_path / "gone" / "t.png")


def test_without_matplotlib_a_picture_is_refused_before_the_work(steps, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    code, out, err = steps("--plot", "t.png")
    assert (code, out) == (1, "")
    assert err == (
        "error: pictures need matplotlib, which is not installed: pip install 'bitmtp-tvm[plot]'\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "--prompts", "p"], "--prompts goes with --modes"),
        (["--steps", "--max-new-tokens", "4"], "--max-new-tokens goes with --modes"),
        (["--steps", "--block-sizes", "4"], "--block-sizes goes with --modes"),
        (["--steps", "--layouts", "chain"], "--layouts goes with --modes"),
        (["--modes", "--fill", "4"], "--fill goes with --steps and --kernels"),
        (["--modes", "--plot", "t.png"], "--plot goes with --steps and --kernels"),
        (["--steps", "--before", "f"], "--before goes with --kernels"),
        (["--kernels", "--peer", "transformers"], "--peer goes with --steps"),
        (["--modes", "--peer", "transformers"], "--peer goes with --steps"),
    ],
)
def test_options_of_the_other_measurement_are_refused(arguments, message, capsys):
    assert command.main(["--artifact", "somewhere", *arguments]) == 2
    assert capsys.readouterr() == ("", f"error: {message}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments --steps --kernels --modes is required"),
        (["--steps", "--modes"], "not allowed with"),
        (["--steps", "--fill", "0"], "'0' is not a whole number of at least 1"),
        (["--steps", "--peer", "vllm"], "invalid choice: 'vllm'"),
        (["--modes", "--block-sizes", "4,x"], "'x' is not a whole number"),
        (["--modes", "--layouts", "chain,wide"], "'wide' is no layout: choose of auto, chain, out"),
    ],
)
def test_a_command_line_that_makes_no_sense(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--artifact", "somewhere", *arguments])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_an_artifact_that_is_none(capsys):
    assert command.main(["--artifact", "/nowhere", "--steps"]) == 1
    assert capsys.readouterr().err.startswith("error: /nowhere is not there: give the folder")


def test_the_processor_says_what_it_is():
    state = device_state.device_state("llvm")
    assert state["device"] and int(state["cores"]) >= 1 and len(state["load"].split()) == 3


def test_nvidia_smi_is_read_where_there_is_one(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    values = "580.1, P0, 1980 MHz, 1980 MHz, 3201 MHz, [N/A], 700.00 W, 41"
    tool.write_text(f'#!/bin/sh\necho "{values}"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(device_state, "read_device", lambda: SimpleNamespace(name="NVIDIA H200"))
    assert device_state.device_state("cuda") == {
        "device": "NVIDIA H200",
        "driver": "580.1",
        "performance_state": "P0",
        "clock_sm": "1980 MHz",
        "clock_sm_most": "1980 MHz",
        "clock_memory": "3201 MHz",
        "power_limit": "700.00 W",
        "temperature": "41",
    }
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert device_state.device_state("cuda")["device"] == "NVIDIA H200"
