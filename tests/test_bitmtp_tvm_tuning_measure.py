"""Measuring a plan: on real kernels of the processor, and with a device that does as it is told."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from imports import ROOT
from lost_signal import Losing, ended_at_once
from tuning_folder import (
    ABORTS,
    EQUAL,
    LAYERS,
    RULE,
    WRONG,
    norm,
    plan,
    task,
    write_folder,
)

from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.records import Records, read_device_info
from bitmtp_tvm.timing import HostTimer
from bitmtp_tvm.tune import main
from bitmtp_tvm.tuning_bench import Workbench
from bitmtp_tvm.tuning_log import Measurements, open_measurements, read_measurements
from bitmtp_tvm.tuning_measure import Measuring
from bitmtp_tvm.tuning_merge import chain_shares, merge, summary
from bitmtp_tvm.tuning_plan import MEASUREMENTS, PLAN, read_plan
from bitmtp_tvm.tuning_process import WorkerProcess

# In a runtime-only TVM, as on a board.
PROGRAM = """
import sys
from bitmtp_tvm.tune import main
code = main(["--measure", sys.argv[1]])
import tvm
assert tvm.base._RUNTIME_ONLY
assert not [name for name in sys.modules if name.startswith(("schedules", "tvm.relax"))]
sys.exit(code)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two tasks; one has a candidate that ends the process, and one that is wrong. A norm that is
    fixed stands in front of one."""
    directory = tmp_path_factory.mktemp("tune")
    aborting = task("two", 2, functions=(RULE, ABORTS, WRONG, EQUAL))
    found = write_folder(directory, aborting, task("three", 3), norm(2))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, directory],
        cwd=ROOT,
        env={**os.environ, "TVM_USE_RUNTIME_LIB": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return directory, found


def statuses(known, name):
    return {f.rpartition("_")[2]: status for f, (status, _) in known.alone[name].items()}


def test_a_crash_costs_one_candidate_and_a_wrong_one_never_wins(folder):
    directory, _ = folder
    known = read_measurements(directory)
    assert known.twins == {"two": "ok", "three": "ok", "norm_w2": "ok"}
    found = {RULE: "ok", ABORTS: "crashed", WRONG: "wrong", EQUAL: "ok"}
    assert statuses(known, "two") == found
    assert statuses(known, "three") == {k: v for k, v in found.items() if k != ABORTS}
    assert set(known.chains) == {"step_w2", "step_w3"}
    assert known.chains["step_w2"].choice["two"] in ("two_rule", "two_equal")
    assert known.device["gbs"] > 0 and known.device["state"]["device"]


def test_merged_records_are_of_the_device_and_the_winner_stands_first(folder, tmp_path):
    directory, found = folder
    known = read_measurements(directory)
    assert merge(found, known, tmp_path, "the command") == 2
    records = Records.read(tmp_path)
    for item in found.searched:
        winner, *others = records.of(item.key)
        chosen = known.chains[f"step_w{item.key.width}"].choice[item.name]
        (candidate,) = [c for c in item.candidates if c.function == chosen]
        assert winner.arguments == candidate.arguments
        assert winner.chain_seconds and winner.seconds
        assert (winner.provenance, winner.source) == ("measured", "cpu")
        assert len(others) == 1 and others[0].chain_seconds is None
    info = read_device_info(tmp_path)
    assert (info.target, info.command, info.commit) == ("cpu", "the command", "abc1234")
    assert info.device == known.device["state"]["device"] and info.date


def test_a_chain_holds_what_is_fixed_and_shares_its_time_with_it(folder):
    directory, found = folder
    known = read_measurements(directory)
    chain = known.chains["step_w2"]
    assert set(chain.choice) == {"two"} and set(known.seconds("norm_w2")) == {"norm_w2"}
    parts = chain_shares(found, known, "step_w2", chain)
    assert set(parts) == {"two", "norm_w2"}
    assert math.isclose(LAYERS * sum(parts.values()), chain.seconds)


def test_a_bucket_is_launched_whole_and_in_its_order(folder):
    """Of each kernel as many launches as layers, the weights of a layer in each."""
    import tvm

    class Launches(HostTimer):
        def seconds(self, calls, replays=0):
            self.calls = calls
            return super().seconds(calls, replays)

    directory, found = folder
    timer = Launches()
    bench = Workbench(found, directory, tvm.cpu(0), timer, 1 << 30, 0)
    assert bench.chain("step_w2", {"two": "two_equal"}) > 0
    norms, linears = timer.calls[::2], timer.calls[1::2]
    assert len(norms) == len(linears) == LAYERS
    shapes = [[tuple(array.shape) for array in call.args] for call in (norms[0], linears[0])]
    assert shapes == [[*found.task("norm_w2").shapes], [*found.task("two").shapes]]
    assert len({id(call.args[1]) for call in norms}) == LAYERS
    assert not found.task("norm_w2").candidates[0].template


class Device:
    """Answers as `tuning_worker` does. `seconds`: by function; `bad`: other answers by function;
    `cost`: what each question takes of the clock."""

    def __init__(self, seconds, bad=None, twins=None, cost=0.0):
        self.seconds, self.bad, self.twins = seconds, bad or {}, twins or {}
        self.now, self.cost, self.asked, self.closed = 0.0, cost, [], False

    def ask(self, job):
        self.asked.append(job)
        self.now += self.cost
        if job["do"] == "device":
            return {"gbs": 100.0, "state": {"device": "a fake"}, "cores": 2, "date": "2026-01-01"}
        if job["do"] == "twin":
            return {"status": self.twins.get(job["task"], "ok")}
        if job["do"] == "chain":
            return {"status": "ok", "seconds": sum(map(self.alone, job["choice"].values()))}
        if job["function"] in self.bad:
            return {"status": self.bad[job["function"]]}
        return {"status": "ok", "seconds": self.alone(job["function"])}

    def alone(self, function):
        return self.seconds.get(function.rpartition("_")[2], 1.0)

    def close(self):
        self.closed = True

    def count(self):
        return Counter(job["do"] for job in self.asked)


TASKS = (task("two", 2), task("three", 3))
SECONDS = {RULE: 3e-6, EQUAL: 2e-6, WRONG: 1e-6}


def run(tmp_path, device, tasks=TASKS, resume=False, **options):
    known = open_measurements(tmp_path, resume)
    measuring = Measuring(plan(*tasks), device, known, clock=lambda: device.now, **options)
    return measuring.run()


def test_the_fastest_right_one_wins(tmp_path):
    device = Device(SECONDS, bad={"two_wrong": "wrong", "three_wrong": "timeout"})
    known = run(tmp_path, device)
    assert known.chains["step_w2"].choice == {"two": "two_equal"}
    assert known.chains["step_w2"].before > known.chains["step_w2"].seconds
    assert known.seconds("three") == {"three_rule": 3e-6, "three_equal": 2e-6}
    assert device.closed and device.count()["twin"] == 2


@pytest.mark.parametrize("works", [True, False])
def test_what_records_give_now_is_tried_in_the_chain(tmp_path, works):
    """Alone ten others are faster than it."""
    names = (RULE, "known", *(f"fast{i}" for i in range(10)))
    tuned = replace(task("two", 2, functions=names), current="two_known")

    class Together(Device):
        def ask(self, job):
            known = job["do"] == "chain" and "two_known" in job["choice"].values()
            return {"status": "ok", "seconds": 1e-7} if known else super().ask(job)

    seconds = {RULE: 3e-6, "known": 2e-6, **{f"fast{i}": 1e-6 for i in range(10)}}
    known = run(tmp_path, Together(seconds, {} if works else {"two_known": "wrong"}), (tuned,))
    assert (known.chains["step_w2"].choice == {"two": "two_known"}) == works


def test_nothing_wins_where_the_rule_itself_is_wrong(tmp_path):
    device = Device(SECONDS, twins={"two": "wrong"})
    known = run(tmp_path, device)
    assert known.seconds("two") == {} and "step_w2" not in known.chains
    assert merge(plan(*TASKS), known, tmp_path / "records", "") == 1
    both = Device(SECONDS, twins={"two": "wrong", "three": "wrong"})
    (tmp_path / "again").mkdir()
    with pytest.raises(BitMTPError, match="does not agree with the reference"):
        run(tmp_path / "again", both)


def test_an_interrupted_run_goes_on_where_it_was(tmp_path):
    class Interrupted(Device):
        def ask(self, job):
            if job.get("function") == "two_equal":
                raise KeyboardInterrupt
            return super().ask(job)

    device = Interrupted(SECONDS)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, device)
    assert device.closed
    path = tmp_path / MEASUREMENTS
    path.write_text(path.read_text() + '{"what": "alone", "task": "tw')
    with pytest.raises(UsageError, match="is there already: add --resume"):
        run(tmp_path, Device(SECONDS))
    again = Device(SECONDS)
    known = run(tmp_path, again, resume=True)
    before = sum(job["do"] == "alone" for job in device.asked)
    assert before and again.count()["alone"] == 6 - before
    assert not again.count()["twin"]
    assert all(json.loads(line) for line in path.read_text().splitlines())
    assert {len(known.alone[name]) for name in ("two", "three")} == {3}
    third = Device(SECONDS)
    run(tmp_path, third, resume=True)
    assert third.count() == {"device": 1}


@pytest.mark.parametrize("question", ["alone", "chain"])
def test_a_ctrl_c_that_was_lost_ends_it(tmp_path, question):
    device, losing = Device(SECONDS), Losing()
    ask = device.ask

    def answer(job):
        if job["do"] == question:
            losing()
        return ask(job)

    device.ask = answer
    assert ended_at_once(lambda: run(tmp_path, device), losing)
    assert device.closed and open_measurements(tmp_path, resume=True).alone


def test_another_device_is_not_mixed_in(tmp_path):
    run(tmp_path, Device(SECONDS))

    class Other(Device):
        def ask(self, job):
            answer = super().ask(job)
            return {**answer, "state": {"device": "another"}} if job["do"] == "device" else answer

    with pytest.raises(UsageError, match="is of a fake, and this is another"):
        run(tmp_path, Other(SECONDS), resume=True)


def test_time_is_kept_for_the_chains_and_the_likeliest_come_first(tmp_path):
    device = Device(SECONDS, cost=1.0)
    known = run(tmp_path, device, deadline=13.0)
    assert set(known.alone) == {"two", "three"}
    assert all(next(iter(found)).endswith(RULE) for found in known.alone.values())
    assert sum(map(len, known.alone.values())) < 6
    assert known.chains
    (tmp_path / "late").mkdir()
    with pytest.raises(BitMTPError, match="no time was left to measure anything"):
        run(tmp_path / "late", Device(SECONDS, cost=1.0), deadline=1.0)


def test_a_board_has_no_chain_and_the_fastest_alone_wins(tmp_path):
    device = Device(SECONDS, bad={"two_wrong": "wrong", "three_wrong": "wrong"})
    known = run(tmp_path, device, chains=False)
    assert not device.count()["chain"] and not known.chains
    merge(plan(*TASKS), known, tmp_path / "records", "")
    for item in TASKS:
        winner = Records.read(tmp_path / "records").of(item.key)[0]
        assert winner.arguments == {"warps": 2} and winner.chain_seconds is None


def test_what_is_fixed_is_timed_for_the_chain_and_never_looked_for(tmp_path):
    tasks = (*TASKS, norm(2))
    device = Device(SECONDS)
    known = run(tmp_path, device, tasks)
    chains = [job["choice"] for job in device.asked if job["do"] == "chain"]
    assert all(set(choice) in ({"two"}, {"three"}) for choice in chains)
    assert list(known.seconds("norm_w2")) == ["norm_w2"]
    assert merge(plan(*tasks), known, tmp_path / "records", "") == 2
    (tmp_path / "board").mkdir()
    alone = run(tmp_path / "board", Device(SECONDS), tasks, chains=False)
    assert "norm_w2" not in alone.alone and len(summary(plan(*tasks), alone)) == 2


def test_nothing_but_what_is_fixed_is_no_measurement(tmp_path):
    with pytest.raises(BitMTPError, match="does not agree with the reference"):
        run(tmp_path, Device(SECONDS, twins={"two": "wrong"}), (task("two", 2), norm(2)))


def test_bars_hear_of_the_best_so_far(tmp_path):
    heard = []
    run(tmp_path, Device(SECONDS), say=lambda text, done: heard.append((text, done)))
    assert sum(done for _, done in heard) == 6
    assert "two: 2.00 us, " in " ".join(text for text, _ in heard)


def test_a_chain_is_as_long_as_the_layers(tmp_path):
    assert len(plan(*TASKS).buckets["step_w2"]) == LAYERS
    found = run(tmp_path, Device(SECONDS))
    assert math.isclose(found.chains["step_w2"].seconds, 1e-6)


HANGS = 'import sys, time; print(\'{"status": "ok"}\', flush=True); time.sleep(60)'
DIES = 'import sys; print(\'{"status": "ok"}\', flush=True); sys.stdin.readline(); sys.exit(9)'
REFUSES = 'print(\'{"status": "failed", "fault": "no card"}\')'


def test_a_process_that_hangs_or_dies_is_answered_for(monkeypatch, tmp_path):
    monkeypatch.setattr("bitmtp_tvm.tuning_process.ANSWER_SECONDS", 0.3)
    for program, status in ((HANGS, "timeout"), (DIES, "crashed")):
        worker = WorkerProcess(tmp_path, [sys.executable, "-c", program])
        assert worker.ask({"do": "device"})["status"] == status
        # And it is started again.
        assert worker.ask({"do": "device"})["status"] == status
        worker.close()
    with pytest.raises(BitMTPError, match="no card"):
        WorkerProcess(tmp_path, [sys.executable, "-c", REFUSES]).ask({"do": "device"})


def test_a_folder_is_checked(tmp_path, capsys):
    def refused(code, *arguments):
        assert main([*map(str, arguments)]) == code
        return capsys.readouterr().err

    assert "holds no plan.json" in refused(2, "--measure", tmp_path)
    plan(*TASKS).write(tmp_path)
    assert "is missing: copy the whole folder" in refused(1, "--measure", tmp_path)
    (tmp_path / "kernels-0.so").write_bytes(b"")
    wrong = refused(2, "--measure", tmp_path, "--target", "orin")
    assert "is for --target cpu, not orin" in wrong
    assert "holds no measurements.jsonl" in refused(1, "--merge", tmp_path)
    text = (tmp_path / PLAN).read_text()
    (tmp_path / PLAN).write_text(text.replace('"functio', '"funktio', 1))
    assert "plan.json is damaged" in refused(1, "--measure", tmp_path)
    (tmp_path / PLAN).write_text(text.replace('"format_version": 4', '"format_version": 2'))
    assert "format version 2 instead of 4): build the kernels" in refused(1, "--measure", tmp_path)
    (tmp_path / PLAN).write_text(text)
    assert read_plan(tmp_path) == plan(*TASKS)
    (tmp_path / MEASUREMENTS).write_text('{"what": "twin"}\n')
    assert "line 1 of" in refused(1, "--merge", tmp_path)


def test_measurements_without_a_working_kernel_are_nothing_to_merge(tmp_path):
    with pytest.raises(BitMTPError, match="holds no measured kernel"):
        merge(plan(*TASKS), Measurements(tmp_path / MEASUREMENTS), tmp_path, "")
