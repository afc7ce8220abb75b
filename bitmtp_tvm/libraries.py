"""Brings TVM's CUDA part into the process, with the libraries that it was linked against.

`import tvm` loads `libtvm_runtime_cuda.so` and swallows the failure when libcuda or libcudart
cannot be found; later steps then go wrong without a word. The loader accepts any library already in
the process that carries the wanted SONAME, so loading the right files first needs no environment.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bitmtp_tvm import elf
from bitmtp_tvm.errors import BitMTPError

TEGRA_FILES = ("/etc/nv_tegra_release", "/dev/nvgpu", "/dev/nvhost-gpu")
NVIDIA_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", *TEGRA_FILES)

TVM_CUDA_LIBRARY = "libtvm_runtime_cuda.so"
CUDART_WHEEL = ("nvidia-cuda-runtime", "nvidia/cu13/lib", "libcudart.so.13")


def nvidia_device_file() -> str | None:
    """A file that only a machine with an NVIDIA device has, or None."""
    return next((name for name in NVIDIA_FILES if os.path.exists(name)), None)


def is_tegra() -> bool:
    """True on a Jetson."""
    return any(os.path.exists(name) for name in TEGRA_FILES)


def wheel_file(distribution: str, name: str) -> Path | None:
    """A file that the wheel `distribution` installed, or None.

    Asks the installation records, since the packages named `nvidia` of several site folders hide
    one another.
    """
    try:
        path = Path(str(importlib.metadata.distribution(distribution).locate_file(name)))
    except importlib.metadata.PackageNotFoundError:
        return None
    return path if path.exists() else None


def tvm_library_directory() -> Path:
    """Where TVM's libraries are, found without importing it."""
    spec = importlib.util.find_spec("tvm")
    if spec is None or not spec.submodule_search_locations:
        raise BitMTPError("TVM is not installed: pip install apache-tvm==0.27.0.post1")
    package = Path(spec.submodule_search_locations[0])
    # The wheel's folder, then the two of a source tree (a Jetson builds its runtime itself).
    folders = [package / "lib", package / "../../build/lib", package / "../../lib"]
    found = [folder for folder in folders if (folder / "libtvm_runtime.so").exists()]
    return (found or folders)[0].resolve()


def tvm_cuda_library() -> tuple[Path, bytes, elf.Elf]:
    """TVM's CUDA library: path, contents, parsed header; `BitMTPError` if this TVM has none."""
    path = tvm_library_directory() / TVM_CUDA_LIBRARY
    try:
        contents = path.read_bytes()
        return path, contents, elf.parse(contents)
    except (OSError, elf.ElfError) as fault:
        raise BitMTPError(f"this TVM has no usable CUDA part ({path}: {fault})") from fault


def load_libcudart(soname: str) -> None:
    """Load the CUDA runtime: the loader path's own, else the wheel's, which no Jetson can use."""
    if _loads(soname):
        return
    distribution, folder, wheel_soname = CUDART_WHEEL
    if is_tegra():
        raise BitMTPError(
            f"{soname} is not on the loader path, and the wheel's is not made for a Jetson: build "
            "TVM's runtime against the CUDA of its JetPack, or install a JetPack with that CUDA"
        )
    wheel = wheel_file(distribution, f"{folder}/{soname}") if soname == wheel_soname else None
    if wheel is None or not _loads(str(wheel)):
        raise BitMTPError(
            f"{soname} cannot be loaded: pip install 'nvidia-cuda-runtime==13.*', or put the CUDA "
            "toolkit's libraries on the loader path"
        )


def load_libcuda(make_stub: Callable[[], Path] | None = None) -> None:
    """Load the NVIDIA driver's library: the real one, else `make_stub()` where no device is.

    A machine with a device must have its driver's library on the loader path: a stub there would
    hide the device.
    """
    if _loads("libcuda.so.1"):
        return
    device = nvidia_device_file()
    if device is not None:
        raise BitMTPError(
            f"this machine has an NVIDIA device ({device}), but libcuda.so.1 cannot be loaded: "
            "repair the driver's installation or set LD_LIBRARY_PATH to the folder that holds it"
        )
    if make_stub is None:
        raise BitMTPError("no NVIDIA driver found (libcuda.so.1): this needs a machine with a GPU")
    stub = make_stub()
    if not _loads(str(stub)):
        raise BitMTPError(f"the driver stub {stub} cannot be loaded: delete it and try again")


def load_tvm_cuda(make_stub: Callable[[], Path] | None = None) -> None:
    """Make sure that TVM is imported with its CUDA part, in whichever order that happens.

    Best called before the first `import tvm`; a TVM that was imported without its CUDA part gets it
    now. `make_stub` stands in for the driver on a machine that only compiles; without it a missing
    driver is an error. Every process needs this, worker processes included.
    """
    path, contents, header = tvm_cuda_library()
    runtime = [name for name in elf.needed(contents, header) if name.startswith("libcudart.so")]
    for soname in runtime:
        load_libcudart(soname)
    load_libcuda(make_stub)
    registered = import_tvm().get_global_func
    if registered("ffi.Module.create.cuda", allow_missing=True) is None:
        # TVM was imported earlier, or has no compiler library and then leaves this to its user.
        _attach(path)
        _attach(path.with_name("libtvm_runtime_extra.so"))
    if registered("ffi.Module.create.cuda", allow_missing=True) is None:
        raise BitMTPError(f"{path} loads but registers no CUDA modules: reinstall apache-tvm")


def import_tvm() -> Any:
    """Import TVM and return `tvm_ffi`; `BitMTPError` with the cause if it cannot be imported."""
    try:
        import tvm  # noqa: F401
        import tvm_ffi
    except (ImportError, OSError, RuntimeError) as fault:
        raise BitMTPError(f"TVM cannot be imported: {fault}") from fault
    return tvm_ffi


def _attach(path: Path) -> None:
    if path.exists():
        try:
            ctypes.CDLL(str(path))
        except OSError as fault:
            raise BitMTPError(f"TVM's CUDA part cannot be loaded: {fault}") from fault


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
