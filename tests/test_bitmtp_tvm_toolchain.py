import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bitmtp_tvm import elf, libraries, nvrtc, toolchain
from bitmtp_tvm.cache import cache_directory
from bitmtp_tvm.cubin import parse_cubin
from bitmtp_tvm.errors import BitMTPError

ROOT = Path(__file__).resolve().parents[1]

KERNEL = """
extern "C" __global__ void __launch_bounds__(128) sum(const int* a, int* b) {
  __shared__ int s[128];
  s[threadIdx.x] = a[threadIdx.x];
  __syncthreads();
  b[threadIdx.x] = __dp4a(s[threadIdx.x ^ 1], s[127 - threadIdx.x], 0);
}
"""
DEEP = """
extern "C" __global__ void deep(const float* a, float* b, int n) {
  float v[64];
  for (int i = 0; i < 64; i++) v[i] = a[i];
  for (int i = 0; i < n; i++) v[(int)a[64 + i] & 63] += a[i];
  b[0] = v[n & 63];
}
"""


def run_bare(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process that finds no compiler and inherits no variable."""
    environment = {"PATH": "/nonexistent", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_cache_directory_is_made_and_named_by_one_variable(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("BITMTP_CACHE_DIR", str(tmp_path / "a" / "b"))
    assert cache_directory() == tmp_path / "a" / "b"
    assert list((tmp_path / "a" / "b").iterdir()) == []
    monkeypatch.delenv("BITMTP_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "bitmtp_tvm"


def test_a_cache_directory_that_cannot_be_written_says_so(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BITMTP_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(BitMTPError, match="set BITMTP_CACHE_DIR"):
        cache_directory()


def test_versions_come_from_the_installed_wheels() -> None:
    found = toolchain.versions()
    assert found["tvm"].startswith("0.27.") and found["toolkit"].startswith("12.6.")


def test_a_linker_fault_keeps_the_linkers_words(tmp_path: Path) -> None:
    (tmp_path / "bad.s").write_text("no such instruction\n")
    with pytest.raises(BitMTPError, match=r"linking failed: .*bad\.s"):
        toolchain.cross_compiler("aarch64-linux-gnu")(
            str(tmp_path / "out.so"), [str(tmp_path / "bad.s")]
        )
    assert not (tmp_path / "out.so").exists()


def test_prepare_cuda_refuses_the_variable_that_packs_source(monkeypatch) -> None:
    monkeypatch.setenv("TVM_COMPILE_FORCE_FALLBACK", "1")
    with pytest.raises(BitMTPError, match="TVM_COMPILE_FORCE_FALLBACK"):
        toolchain.prepare_cuda()


@pytest.mark.parametrize("first", ["", "import tvm"])
def test_cuda_compiles_with_nothing_but_wheels_whenever_tvm_was_imported(first, tmp_path) -> None:
    code = f"""
{first}
import json, pathlib
from bitmtp_tvm.build import build
from bitmtp_tvm.targets import get_target
from bitmtp_tvm.toolchain import prepare_cuda
from tiny_modules import gpu_module
prepare_cuda()
out = pathlib.Path({str(tmp_path)!r}) / "m.so"
print(json.dumps([build(gpu_module(), get_target("orin"), out).arch, out.stat().st_size]))
"""
    done = run_bare(code, BITMTP_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0] == "sm_87"
    assert b"__global__" not in (tmp_path / "m.so").read_bytes()


def test_importing_the_toolchain_imports_no_tvm() -> None:
    code = "import sys, bitmtp_tvm.build; assert 'tvm' not in sys.modules; import bitmtp_tvm.device"
    assert run_bare(code).returncode == 0


def test_the_driver_stub_says_no_device_under_the_drivers_name(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("BITMTP_CACHE_DIR", str(tmp_path))
    stub = toolchain._driver_stub()
    assert stub.parent == tmp_path and stub.name != "libcuda.so.1"
    assert b"libcuda.so.1\0" in stub.read_bytes()
    _, contents, header = libraries.tvm_cuda_library()
    wanted = {name for name in elf.undefined_symbols(contents, header) if name[:4] == "cuGe"}
    library = ctypes.CDLL(str(stub))
    for name in {"cuInit", "cuModuleLoadData", *wanted}:
        assert getattr(library, name)(0) == 100
    assert toolchain._driver_stub() == stub and len(list(tmp_path.iterdir())) == 1


class Loader:
    """Stands in for the dynamic loader: knows which names it can load, and notes what it did."""

    def __init__(self, *names: str) -> None:
        self.names, self.loaded = names, list[str]()

    def __call__(self, name: str) -> bool:
        if any(known in name for known in self.names):
            self.loaded.append(name)
            return True
        return False


@pytest.fixture
def machine(monkeypatch):
    """Sets what the loader finds and which device files exist."""

    def describe(loader: Loader, *files: str) -> Loader:
        monkeypatch.setattr(libraries, "_loads", loader)
        monkeypatch.setattr(libraries.os.path, "exists", lambda name: name in files)
        return loader

    return describe


def no_stub() -> Path:
    raise AssertionError("the stub was asked for")


def test_a_real_driver_always_wins(machine) -> None:
    loader = machine(Loader("libcuda.so.1"), "/dev/nvidiactl")
    libraries.load_libcuda(no_stub)
    assert loader.loaded == ["libcuda.so.1"]


@pytest.mark.parametrize("file", libraries.NVIDIA_FILES)
def test_a_device_without_its_driver_is_an_error_and_gets_no_stub(machine, file) -> None:
    machine(Loader("stub"), file)
    with pytest.raises(BitMTPError, match=r"libcuda.so.1 cannot be loaded"):
        libraries.load_libcuda(no_stub)


def test_without_driver_and_device_the_stub_serves_to_compile_only(machine) -> None:
    loader = machine(Loader("stub"))
    libraries.load_libcuda(lambda: Path("stub.so"))
    assert loader.loaded == ["stub.so"]
    with pytest.raises(BitMTPError, match="no NVIDIA driver"):
        libraries.load_libcuda()


def test_libcudart_comes_from_the_loader_path_then_from_the_wheel(machine, monkeypatch) -> None:
    monkeypatch.setattr(libraries, "wheel_file", lambda _, name: Path("/wheel") / name)
    loader = machine(Loader("libcudart.so.13"))
    libraries.load_libcudart("libcudart.so.13")
    assert loader.loaded == ["libcudart.so.13"]
    loader = machine(Loader("/wheel"))
    libraries.load_libcudart("libcudart.so.13")
    assert loader.loaded == ["/wheel/nvidia/cu13/lib/libcudart.so.13"]
    with pytest.raises(BitMTPError, match=r"libcudart.so.12 cannot be loaded"):
        libraries.load_libcudart("libcudart.so.12")


@pytest.mark.parametrize("file", libraries.TEGRA_FILES)
def test_a_jetson_never_takes_libcudart_from_the_wheel(machine, file) -> None:
    machine(Loader("/wheel"), file)
    with pytest.raises(BitMTPError, match="not made for a Jetson"):
        libraries.load_libcudart("libcudart.so.13")


@pytest.mark.parametrize(("arch", "sm"), [("sm_86", 86), ("sm_87", 87), ("sm_90a", 90)])
def test_nvrtc_gives_machine_code_of_the_wheels_toolkit(arch: str, sm: int) -> None:
    code, log = nvrtc.compile_cubin(KERNEL, arch)
    cubin = parse_cubin(code)
    assert (cubin.sm, cubin.abi_version, cubin.toolkit) == (sm, 7, (12, 6))
    assert cubin.size == len(code)
    (kernel,) = cubin.kernels
    assert kernel.name == "sum" and kernel.stack_bytes == 0 and kernel.shared_bytes == 512
    assert f"Used {kernel.registers} registers" in log


def test_the_stack_of_a_kernel_is_seen() -> None:
    (kernel,) = parse_cubin(nvrtc.compile_cubin(DEEP, "sm_86")[0]).kernels
    assert kernel.stack_bytes == 256


def test_fast_math_is_off_unless_asked_for() -> None:
    assert "--use_fast_math" not in nvrtc.compile_options("sm_87")
    assert "--use_fast_math" in nvrtc.compile_options("sm_87", fast_math=True)


def test_a_kernel_that_does_not_compile_shows_the_compilers_message() -> None:
    with pytest.raises(BitMTPError, match=r'(?s)does not compile for sm_87.*"nothing" is undef'):
        nvrtc.compile_cubin('extern "C" __global__ void k(int* a) { *a = nothing; }', "sm_87")


def test_a_foreign_nvrtc_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(nvrtc.importlib.metadata, "version", lambda _: "12.8.93")
    with pytest.raises(BitMTPError, match=r"NVRTC 12.6 was found instead of the wheel's 12.8.93"):
        nvrtc.load_nvrtc()


def test_ptx_names_its_architecture_and_every_kernel():
    source = 'extern "C" __global__ void twice(int* x) { x[threadIdx.x] *= 2; }'
    code, _ = nvrtc.compile_ptx(source, "sm_87")
    text = code.decode()
    assert ".target sm_87" in text
    assert ".entry twice" in text
    # TVM tells the two forms apart by the first character.
    assert text.lstrip().startswith("//")
