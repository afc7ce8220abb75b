import platform

import pytest

from bitmtp_tvm.errors import UsageError
from bitmtp_tvm.targets import (
    AARCH64,
    CPU_HOSTS,
    SHARED_MEMORY,
    TARGETS,
    get_target,
    parse_arch,
    tvm_target,
    with_buckets,
)

GPUS = [target for target in TARGETS.values() if target.kind == "cuda"]


def test_the_devices_of_the_readme_are_there() -> None:
    wanted = {"cpu", "h20", "h200", "3090", "orin", "orin-nx", "orin-nano"}
    assert wanted <= set(TARGETS)
    assert all(name == target.name for name, target in TARGETS.items())


def test_an_unknown_target_is_a_usage_error_that_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'cuda'.*cpu, cpu-aarch64, .*orin-nano"):
        get_target("cuda")


@pytest.mark.parametrize(
    ("arch", "capability"),
    [("sm_80", (8, 0)), ("sm_87", (8, 7)), ("sm_90a", (9, 0)), ("sm_120f", (12, 0))],
)
def test_parse_arch(arch: str, capability: tuple[int, int]) -> None:
    assert parse_arch(arch) == capability


@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
def test_every_gpu_row_is_whole(target) -> None:
    assert target.compute_capability == parse_arch(target.arch)
    assert target.shared_memory_per_block == SHARED_MEMORY[target.arch]
    assert target.multiprocessors and target.bandwidth_gbs and target.registers_per_sm
    assert target.l2_bytes < target.memory_bytes
    assert list(target.widths) == sorted(target.widths) and min(target.widths) == 1


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_tvm_takes_every_row(target) -> None:
    made = tvm_target(target)
    assert made.kind.name == target.kind
    assert made.host.attrs["mtriple"] == target.host_triple
    assert made.host.attrs["mcpu"] == target.host_mcpu
    if target.kind == "cuda":
        assert made.attrs["arch"] == target.arch


def test_orins_have_an_arm_host_and_servers_an_x86_one() -> None:
    for target in GPUS:
        assert target.host_triple.startswith("aarch64") == target.name.startswith("orin")


def test_cpu_is_the_machine_that_compiles_and_cpu_aarch64_never_depends_on_it() -> None:
    assert TARGETS["cpu"].host == CPU_HOSTS[platform.machine()]
    assert TARGETS["cpu-aarch64"].host == AARCH64
    assert TARGETS["cpu"].compute_capability is None


def test_other_buckets_leave_the_table_alone() -> None:
    target = with_buckets(get_target("orin"), (1, 3))
    assert target.widths == (1, 3) and target.prefill == TARGETS["orin"].prefill
    assert TARGETS["orin"].widths != (1, 3)
