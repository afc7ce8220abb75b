from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_modules import broken_module, cpu_module, gpu_module

from bitmtp_tvm import build as stage
from bitmtp_tvm.build import build, check_library, manifest_source
from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.manifest import MARKER, embedded_manifest
from bitmtp_tvm.targets import AARCH64, X86_64_V3, get_target

CPU = get_target("cpu")
TEXT = '{"a": "line\n\\"quoted\\" é", "b": ' + "1" * 5000 + "}"


@pytest.fixture(scope="module")
def orin(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("build") / "orin.so"
    build(gpu_module(), get_target("orin"), out)
    return out


@pytest.mark.parametrize(
    ("name", "machine", "sm"),
    [("orin", "aarch64", 87), ("3090", "x86_64", 86), ("h200", "x86_64", 90)],
)
def test_gpu_library(name: str, machine: str, sm: int, tmp_path: Path) -> None:
    out, target, phases = tmp_path / "deep" / "m.so", get_target(name), list[str]()
    report = build(gpu_module(), target, out, phases.append, manifest=TEXT)
    assert phases == ["compile", "link", "check"]
    assert (report.machine, report.arch, report.cubins) == (machine, target.arch, 1)
    assert report.toolkit.startswith("12.6.")
    assert report.least_drivers == {"machine_code": 525, "runtime": 580}
    (kernel,) = report.kernels
    assert kernel.registers > 0 and kernel.stack_bytes == 0
    contents = out.read_bytes()
    assert report.so_bytes == len(contents)
    assert b"__global__" not in contents and contents.count(MARKER) == 1
    assert embedded_manifest(out) == TEXT
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("host", [X86_64_V3, AARCH64], ids=["x86_64", "aarch64"])
def test_cpu_library_for_both_hosts(host, tmp_path: Path) -> None:
    out = tmp_path / "m.so"
    report = build(cpu_module(), replace(CPU, host=host), out, manifest=TEXT)
    assert report.machine == host.triple.split("-")[0]
    assert (report.cubins, report.arch, report.kernels) == (0, "", ())
    assert embedded_manifest(out) == TEXT


def test_the_native_library_computes(tmp_path: Path) -> None:
    import tvm
    import tvm.runtime.vm

    build(cpu_module(), CPU, tmp_path / "m.so")
    module = tvm.runtime.load_module(str(tmp_path / "m.so"))
    machine = tvm.runtime.vm.VirtualMachine(module, tvm.cpu())
    x = np.linspace(-2, 2, 16, dtype=np.float32)
    y = machine["main"](tvm.runtime.tensor(x)).numpy()
    np.testing.assert_allclose(y, np.exp(x).astype(np.float16), rtol=1e-3)


@pytest.mark.parametrize(("module", "name"), [(cpu_module, "cpu"), (gpu_module, "orin")])
def test_the_same_input_gives_the_same_bytes(module, name: str, tmp_path: Path) -> None:
    outs = [tmp_path / "a.so", tmp_path / "elsewhere" / "b.so"]
    for out in outs:
        build(module(), get_target(name), out, manifest="{}")
    assert outs[0].read_bytes() == outs[1].read_bytes()


def test_a_compile_error_is_shown_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(BitMTPError, match=r"(?s)does not compile for sm_87.*no_such_function"):
        build(broken_module(), get_target("orin"), tmp_path / "m.so")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_check_leaves_nothing_and_keeps_what_was_there(tmp_path, monkeypatch) -> None:
    (tmp_path / "m.so").write_text("old")
    monkeypatch.setattr(stage, "find_cubins", lambda _: [])
    with pytest.raises(BitMTPError, match="no GPU machine code"):
        build(gpu_module(), get_target("orin"), tmp_path / "m.so")
    assert [p.name for p in tmp_path.iterdir()] == ["m.so"]
    assert (tmp_path / "m.so").read_text() == "old"


def test_check_refuses_another_machine_arch_toolkit_and_manifest(orin, monkeypatch) -> None:
    target = get_target("orin")
    with pytest.raises(BitMTPError, match="linked for aarch64 instead of x86_64"):
        check_library(orin, get_target("3090"))
    with pytest.raises(BitMTPError, match="for sm_87, not for sm_86"):
        check_library(orin, replace(target, arch="sm_86"))
    with pytest.raises(BitMTPError, match="does not hold the manifest"):
        check_library(orin, target, "{}")
    monkeypatch.setattr(stage, "versions", lambda: {"toolkit": "13.0.88"})
    with pytest.raises(BitMTPError, match=r"code of CUDA 12.6, not of the wheel's 13.0.88"):
        check_library(orin, target)


def test_check_refuses_source_text(orin: Path, tmp_path: Path) -> None:
    (tmp_path / "m.so").write_bytes(orin.read_bytes() + b'extern "C" __global__ void k() {}')
    with pytest.raises(BitMTPError, match="CUDA source text"):
        check_library(tmp_path / "m.so", get_target("orin"))


def test_check_refuses_a_symbol_that_nobody_provides(orin: Path, monkeypatch) -> None:
    monkeypatch.setattr(stage.elf, "undefined_symbols", lambda *_: ["TVMX", "expf", "__divti3"])
    with pytest.raises(BitMTPError, match="needs __divti3,"):
        check_library(orin, get_target("orin"))


def test_manifest_source_spells_every_byte() -> None:
    rows = [row for row in manifest_source("{}").splitlines() if ".byte" in row]
    numbers = [int(n) for row in rows for n in row.replace(".byte", "").split(",")]
    assert bytes(numbers) == MARKER + b"{}\0"
