"""One thread a core, of those that the process may use."""

import math
import os
import platform
import subprocess
import sys

import pytest

from bitmtp_tvm import threads


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Four cores of two logical processors each: 0 and 4, 1 and 5, 2 and 6, 3 and 7."""
    for processor in range(8):
        folder = tmp_path / f"cpu{processor}/topology"
        folder.mkdir(parents=True)
        core = processor % 4
        (folder / "thread_siblings_list").write_text(f"{core},{core + 4}\n")
    monkeypatch.setattr(threads, "_TOPOLOGY", tmp_path)
    monkeypatch.setattr(threads, "_GROUP", tmp_path)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(threads, "_survive_forks", lambda: None)
    return tmp_path


def asked():
    """The environment that `use_cores` leaves."""
    threads.use_cores()
    named = {*threads.CHOSEN, "TVM_BIND_THREADS"}
    return {name: value for name, value in os.environ.items() if name in named}


def of(count):
    return {"TVM_BIND_THREADS": "0", "TVM_NUM_THREADS": str(count)}


def test_a_core_counts_once(machine):
    assert asked() == of(4)


def test_no_core_is_taken_that_the_process_may_not_use(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5, 6, 7, 2})
    assert threads.usable_cores() == [2, 5, 7] and asked() == of(3)


@pytest.mark.parametrize(
    ("quota", "count"),
    [
        ("max 100000\n", 4),
        ("200000 100000\n", 2),
        ("250000 100000\n", 3),
        ("50000 100000\n", 1),
        ("900000 100000\n", 4),
        ("nonsense\n", 4),
    ],
)
def test_a_container_has_no_more_threads_than_it_may_keep_busy(machine, quota, count):
    (machine / "cpu.max").write_text(quota)
    assert asked() == of(count)


@pytest.mark.parametrize(("quota", "count"), [("200000", 2), ("-1", 4)])
def test_control_groups_of_version_1_say_it_in_two_files(machine, quota, count):
    (machine / "cpu").mkdir()
    (machine / "cpu/cpu.cfs_quota_us").write_text(f"{quota}\n")
    (machine / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert asked() == of(count)


def test_every_processor_is_a_core_where_nothing_tells(machine, monkeypatch):
    monkeypatch.setattr(threads, "_TOPOLOGY", machine / "none")
    assert asked() == of(8)


@pytest.mark.parametrize("name", threads.CHOSEN)
def test_who_chose_a_number_keeps_it(machine, name):
    os.environ[name] = "3"
    assert asked() == {"TVM_BIND_THREADS": "0", name: "3"}


def test_who_chose_where_threads_run_keeps_that(machine):
    os.environ["TVM_BIND_THREADS"] = "1"
    assert asked()["TVM_BIND_THREADS"] == "1"


def test_tvm_counts_right_elsewhere(machine, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert asked() == {}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    from bitmtp_tvm.compile import CompileOptions, compile_model

    folder = tmp_path_factory.mktemp("demo") / "artifact"
    compile_model(CompileOptions("cpu", context=128, widths=(1,), output=folder))
    return folder


COUNTS = """
import os, sys, threading
import tvm
from bitmtp_tvm import Engine
from bitmtp_tvm.threads import usable_cores

before = os.sched_getaffinity(0)
engine = Engine(sys.argv[1])
engine.generate("def f(", 2).result()
found = [tvm.get_global_func("runtime.NumThreads")()]
asking = threading.Thread(
    target=lambda: found.append(tvm.get_global_func("runtime.NumThreads")())
)
asking.start()
asking.join()
print(*found, len(usable_cores()), before == os.sched_getaffinity(0))
"""

FORKS = """
import os, sys
from bitmtp_tvm import Engine

engine = Engine(sys.argv[1])
if sys.argv[2] == "used":
    engine.generate("def f(", 2).result()
child = os.fork()
found = engine.generate("import ", 8).result().token_ids
if child:
    os.waitpid(child, 0)
print(*found, sep=",", flush=True)
os._exit(0)
"""


def run_alone(code, *arguments):
    """What a process prints whose environment says nothing of threads."""
    chosen = {*threads.CHOSEN, "TVM_BIND_THREADS"}
    unset = {name: value for name, value in os.environ.items() if name not in chosen}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(
        command, env=unset, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.split()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="TVM counts right elsewhere")
def test_every_thread_that_runs_kernels_has_all_cores_and_nobody_is_bound(artifact):
    first, other, cores, unbound = run_alone(COUNTS, artifact)
    # A control group may allow less than its cores.
    expected = math.ceil(min(int(cores), threads._quota()))
    assert int(first) == int(other) == expected and unbound == "True"


@pytest.mark.parametrize("before", ["made", "used"])
def test_an_engine_goes_on_in_a_forked_child(artifact, before):
    childs, parents = run_alone(FORKS, artifact, before)
    assert childs == parents and len(parents.split(",")) == 8
