"""Timing: what a clock counts; on a GPU, that a graph runs the calls and the ceiling is read."""

import gpu_kernels
import numpy as np
import pytest

from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.streaming import LOADS, ptx, read_bandwidth
from bitmtp_tvm.timing import LEAST_REPLAYS, MOST_REPLAYS, HostTimer


class Clock:
    """Time passes only in calls."""

    def __init__(self):
        self.now, self.calls = 0.0, 0

    def __call__(self):
        return self.now

    def spend(self, seconds):
        def call():
            self.calls += 1
            self.now += seconds

        return call


def test_a_processor_s_calls_are_added_up():
    clock = Clock()
    seconds = HostTimer(clock).seconds([clock.spend(0.001), clock.spend(0.002)])
    assert seconds == pytest.approx(0.003)
    assert clock.calls == 2 * LEAST_REPLAYS


@pytest.mark.parametrize(("each", "replays"), [(1.0, LEAST_REPLAYS), (1e-6, MOST_REPLAYS)])
def test_long_calls_are_repeated_less(each, replays):
    clock = Clock()
    assert HostTimer(clock).seconds([clock.spend(each)]) == pytest.approx(each)
    assert clock.calls == replays
    assert HostTimer(clock).seconds([clock.spend(each)], replays=3) == pytest.approx(each)
    assert clock.calls == replays + 3


def test_the_median_counts_and_not_an_interruption():
    clock = Clock()
    times = iter([0.5] + [0.001] * 100)
    seconds = HostTimer(clock).seconds([lambda: clock.spend(next(times))()])
    assert seconds == pytest.approx(0.001)


def test_the_reading_kernel_loads_sixteen_bytes_at_a_time():
    text = ptx()
    assert text.count("ld.global.v4.u32") == LOADS
    assert text.count("or.b32") == 4 * LOADS
    assert "LOADING" not in text and "ORING" not in text


def test_a_processor_s_ceiling_is_the_speed_of_a_sum():
    assert read_bandwidth("llvm", None, HostTimer()) > 0


@pytest.fixture
def device():
    from bitmtp_tvm.libraries import load_tvm_cuda

    load_tvm_cuda()
    import tvm

    return tvm.cuda(0)


@pytest.mark.gpu
def test_a_graph_runs_every_call(kernels, rng, device):
    import tvm

    from bitmtp_tvm.timing import CudaTimer

    size, width = gpu_kernels.NORM_SIZES[0], 9
    item = gpu_kernels.kernel("norm_quantize", size, gpu_kernels.EPS, width=width)
    x = gpu_kernels.normal(rng, width, size)
    weight = np.ones(size, np.float32)
    results = [np.full((width, size), 77, np.int8), np.zeros(width, np.float32)]
    want = kernels.run(item, [x, weight, *results, np.zeros(width, np.int32)])
    timer = CudaTimer(device)
    sets = []
    for _ in range(5):
        arrays = [x, weight, *results, np.zeros(width, np.int32)]
        sets.append([tvm.runtime.tensor(array, device) for array in arrays])
    function = kernels.function(item)
    calls = [lambda tensors=tensors: function(*tensors) for tensors in sets]
    assert 0 < timer.seconds(calls, replays=3) < 1
    for tensors in sets:
        for tensor, array in zip(tensors, want, strict=True):
            assert np.array_equal(tensor.numpy(), array)

    def fails():
        raise ValueError("while the graph is made")

    with pytest.raises(ValueError, match="while the graph is made"):
        timer.seconds([calls[0], fails])
    # A capture that was broken off leaves nothing behind.
    assert 0 < timer.seconds(calls, replays=3) < 1


@pytest.mark.gpu
def test_the_ceiling_is_near_the_data_sheet(device):
    import tvm

    from bitmtp_tvm.device import read_device
    from bitmtp_tvm.targets import TARGETS
    from bitmtp_tvm.timing import CudaTimer

    tvm.runtime.empty((1,), "int32", device)
    rate = read_bandwidth("cuda", device, CudaTimer(device), 64 << 20)
    names = {t.description: t.bandwidth_gbs for t in TARGETS.values()}
    sheet = names.get(read_device().name)
    assert rate > 20
    # Above it only caches would be measured.
    assert sheet is None or 0.3 * sheet < rate < 1.05 * sheet


@pytest.mark.gpu
def test_a_folder_is_measured_and_merged(request, tmp_path):
    import shutil

    from bitmtp_tvm.records import Records
    from bitmtp_tvm.tune import main
    from bitmtp_tvm.tuning_log import read_measurements
    from bitmtp_tvm.tuning_plan import read_plan

    folder = request.config.getoption("--tuning")
    if folder is None:
        pytest.skip("needs --tuning DIR")
    made = tmp_path / "made"
    shutil.copytree(folder, made, ignore=shutil.ignore_patterns("measurements.jsonl"))
    assert main(["--measure", str(made)]) == 0
    plan, known = read_plan(made), read_measurements(made)
    assert set(known.twins.values()) == {"ok"}
    assert set(known.chains) == {name for name, tasks in plan.buckets.items() if tasks}
    for task in plan.tasks:
        wrong = {f: s for f, (s, _) in known.alone[task.name].items() if s != "ok"}
        assert not wrong
    assert main(["--merge", str(made), "--records", str(tmp_path / "records")]) == 0
    records = Records.read(tmp_path / "records")
    assert all(records.of(task.key)[0].chain_seconds for task in plan.tasks)


def test_a_card_of_another_kind_is_refused():
    from tuning_folder import plan, task

    from bitmtp_tvm.tuning_measure import check_card

    found = plan(task())
    card = found.__class__(**{**vars(found), "target": "h20", "arch": "sm_90a"})
    answer = {"cores": 132, "state": {"device": "NVIDIA H200"}}
    with pytest.raises(BitMTPError, match="NVIDIA H200 has 132 multiprocessors, and --target h20"):
        check_card(card, answer)
    check_card(card, {**answer, "cores": 78})
