"""One thread a core, of those that the process may use."""

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

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
    monkeypatch.setattr(threads, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    for name in threads.CHOSEN:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def asked():
    """What `use_cores` asks of TVM: mode, threads and processors."""
    calls = []
    found = {"runtime.config_threadpool": lambda *arguments: calls.append(arguments)}
    threads.use_cores(SimpleNamespace(get_global_func=found.__getitem__))
    return calls


def test_a_core_counts_once(machine):
    assert asked() == [(-3, 4, ["0", "1", "2", "3"])]


def test_no_core_is_taken_that_the_process_may_not_use(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5, 6, 7, 2})
    assert asked() == [(-3, 3, ["2", "5", "7"])]


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
    assert asked() == [(-3, count, ["0", "1", "2", "3"])]


def test_every_processor_is_a_core_where_nothing_tells(machine, monkeypatch):
    monkeypatch.setattr(threads, "_TOPOLOGY", machine / "none")
    assert asked()[0][1] == 8


@pytest.mark.parametrize("name", threads.CHOSEN)
def test_who_chose_a_number_keeps_it(machine, monkeypatch, name):
    monkeypatch.setenv(name, "3")
    assert asked() == []


def test_tvm_counts_right_elsewhere(machine, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert asked() == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="TVM counts right elsewhere")
def test_tvm_starts_as_many():
    """In a process of its own: TVM starts its threads once."""
    code = (
        "import tvm; from bitmtp_tvm import threads; threads.use_cores(tvm); "
        "print(tvm.get_global_func('runtime.NumThreads')(), len(threads.usable_cores()))"
    )
    unset = {name: value for name, value in os.environ.items() if name not in threads.CHOSEN}
    # A control group may allow less than its cores; then there is nothing to compare.
    if threads._quota() < len(threads.usable_cores()):
        pytest.skip("the control group limits the processors")
    done = subprocess.run(
        [sys.executable, "-c", code], env=unset, capture_output=True, text=True, check=True
    )
    started, cores = map(int, done.stdout.split())
    assert started == cores
