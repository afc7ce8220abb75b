"""MetaSchedule on the processor's kernels: what is searched, what is checked, what is kept."""

import pytest
import tvm
from cpu_kernels import CPU, build
from lost_signal import Losing, ended_at_once
from test_bitmtp_tvm_tuned import norm, operation

from bitmtp_tvm import schedule_timing, tuning_schedules
from bitmtp_tvm.databases import decisions_of, read_database
from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.ranked_search import RankedSearch, next_ones
from bitmtp_tvm.records import DeviceInfo, write_device_info
from bitmtp_tvm.specialize import bind_dims
from bitmtp_tvm.targets import get_target
from bitmtp_tvm.tuned import Tuned
from bitmtp_tvm.tuning_schedules import results_of, schedule_tasks, tune_schedules
from relax_models import attention_ops, ops


def searched(func, trials, each):
    """Decisions of the candidates, batch by batch."""
    found = operation(func)
    search = RankedSearch(found)
    search.pre_tuning(trials, each, [], None, None)
    batches = []
    while batch := search.generate_measure_candidates():
        batches.append([decisions_of(one.sch.trace, found) for one in batch])
    return found, batches


def test_a_small_space_is_measured_once_and_completely():
    found, batches = searched(norm(), trials=100, each=3)
    assert [len(batch) for batch in batches] == [3, 1]
    assert sorted(one["grain"] for batch in batches for one in batch) == [1, 2, 4, 8]
    assert found.count() == 4


def test_a_large_space_is_measured_up_to_the_trials():
    linear = bind_dims(ops.low_bit_linear((512,), 256, "llvm", "bitnet-ternary"), {"width": 8})
    found, batches = searched(linear, trials=10, each=4)
    decided = [tuple(one.items()) for batch in batches for one in batch]
    assert len(decided) == len(set(decided)) == 10 < found.count()


def test_a_ctrl_c_that_was_lost_ends_the_search(monkeypatch):
    losing = Losing(RankedSearch.generate_measure_candidates)
    monkeypatch.setattr(RankedSearch, "generate_measure_candidates", lambda search: losing(search))
    assert ended_at_once(lambda: searched(norm(), trials=100, each=1), losing)


def test_the_cost_model_says_what_comes_next():
    asked = []

    def score(indices):
        asked.append(list(indices))
        return [float(index) for index in indices]

    chosen = next_ones(1000, 8, score, seed=3)
    (lot,) = asked
    assert len(lot) == len(set(lot)) == 64
    assert chosen[:6] == sorted(lot)[:-7:-1]
    assert len(set(chosen)) == 8 and set(chosen) <= set(lot)
    assert next_ones(5, 8, score, seed=3) == [0, 1, 2, 3, 4]


def test_equal_operations_are_one_task_and_fixed_ones_none():
    kernels = {"a": norm(), "b": norm(), "c": norm(4), "d": norm(1)}
    assert [task.names for task in schedule_tasks(kernels, CPU)] == [("a", "b"), ("c",)]


def test_the_results_of_an_operation_are_the_buffers_that_it_writes():
    assert results_of(operation(norm())) == (2, 3, 4)
    rope = bind_dims(ops.rope_kv_write(4, 2, 16, 20, 24), {"width": 4})
    assert results_of(operation(rope)) == (4, 5)


def test_integers_of_a_measurement_are_safe_indices():
    func = bind_dims(attention_ops.attention(4, 2, 16, 1024, False), {"width": 2})
    infos = [("TENSOR", str(p.ty.dtype), [int(d) for d in p.ty.shape]) for p in func.params]
    ((q, cache, boundary, visible, _),) = schedule_timing.make_arguments(tvm.cpu(), infos, 1)
    assert (q.dtype, cache.shape) == ("float32", (2, 2, 1024, 16))
    assert boundary.numpy().tolist() == [512]
    assert (visible.numpy() == 0xFFFFFFFF).all()


def test_other_results_than_the_rules_are_an_error(tmp_path):
    """What a broken schedule would do: here another operation stands in for it."""

    def measured(eps):
        func = bind_dims(ops.norm_quantize(72, eps), {"width": 4})
        infos = [("TENSOR", str(p.ty.dtype), [int(d) for d in p.ty.shape]) for p in func.params]
        arguments = schedule_timing.make_arguments(tvm.cpu(), infos, 1)
        built = build(operation(func).function())
        file = str(tmp_path / "reference")
        return schedule_timing.run_checked(file, (2, 3), built, tvm.cpu(), None, arguments)

    first, again = measured(1e-5), measured(1e-5)
    assert first[0] > 0 and again[0] > 0
    with pytest.raises(ValueError, match="not those of the rule"):
        measured(0.5)


def test_what_tuning_needs_is_named(monkeypatch):
    monkeypatch.setattr(tuning_schedules, "PACKAGES", ("psutil_of_tomorrow",))
    with pytest.raises(BitMTPError, match=r"psutil_of_tomorrow: pip install '\.\[tune\]'"):
        tuning_schedules.require_packages()


@pytest.mark.slow
def test_an_interruption_keeps_what_was_found(tmp_path):
    """Builder, runner, cost model and database, on one small kernel."""
    told = []

    def stop(outcome):
        told.append(outcome)
        raise KeyboardInterrupt

    tasks = schedule_tasks({"a": norm(), "b": norm(4)}, CPU)
    with pytest.raises(KeyboardInterrupt):
        tune_schedules(tasks, get_target("cpu"), tmp_path, 2, progress=stop)
    (outcome,) = told
    assert outcome.task is tasks[0]
    assert 0 < outcome.best <= outcome.ruled
    assert len(read_database(tmp_path)) == 1
    write_device_info(tmp_path, DeviceInfo("cpu", "this one"))
    _, origin = Tuned.open(tmp_path, get_target("cpu")).schedule(norm(), CPU)
    assert (origin.provenance, origin.arguments) == ("measured", dict(outcome.decided))
