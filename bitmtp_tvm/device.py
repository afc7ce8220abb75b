"""What the machine offers: read once, compared with what an artifact needs."""

import ctypes
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from bitmtp_tvm import elf
from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.libraries import load_libcuda, tvm_cuda_library

# The CUDA version that a driver branch brings, as cuDriverGetVersion spells it.
DRIVER_CUDA = {525: 12000, 580: 13000}

_MAJOR, _MINOR, _INTEGRATED = 75, 76, 18

# Linux's auxiliary vector on aarch64: the entry, and the bits of it that targets may ask for.
_AT_HWCAP = 16
_HWCAP_BITS = {"asimd": 1, "atomics": 8, "asimddp": 20}


@dataclass(frozen=True)
class DeviceFacts:
    """A device: capability `(9, 0)`, or None for the processor; memory in bytes.

    `driver` is the CUDA version of the driver as cuDriverGetVersion gives it (13000 is 13.0) and
    `cudart` the major version of the CUDA runtime that TVM is linked against.
    """

    compute_capability: tuple[int, int] | None
    driver: int
    total: int
    free: int
    name: str = "the GPU"
    cudart: int = 13


def read_host() -> DeviceFacts:
    """The processor's memory."""
    memory = _meminfo()
    return DeviceFacts(None, 0, memory["MemTotal"], memory["MemAvailable"], "this machine")


def read_device(index: int = 0) -> DeviceFacts:
    """Ask the NVIDIA driver about a device; `BitMTPError` if there is no driver or no device."""
    load_libcuda()
    cuda = ctypes.CDLL("libcuda.so.1")
    if (status := cuda.cuInit(0)) != 0:
        raise BitMTPError(f"no usable NVIDIA GPU on this machine (cuInit says {status})")
    count, device, version = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    call_driver(cuda, "cuDriverGetVersion", ctypes.byref(version))
    call_driver(cuda, "cuDeviceGetCount", ctypes.byref(count))
    if index >= count.value:
        raise BitMTPError(f"there is no GPU {index}: this machine shows {count.value} of them")
    call_driver(cuda, "cuDeviceGet", ctypes.byref(device), index)
    name = ctypes.create_string_buffer(256)
    call_driver(cuda, "cuDeviceGetName", name, len(name), device)
    capability = (_attribute(cuda, _MAJOR, device), _attribute(cuda, _MINOR, device))
    free, total = _memory(cuda, device)
    label = name.value.decode(errors="replace")
    return DeviceFacts(capability, version.value, total, free, label, _cudart_major())


def _memory(cuda: ctypes.CDLL, device: ctypes.c_int) -> tuple[int, int]:
    context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    # The primary context is the one that TVM will use: it stays, so that it is made only once.
    call_driver(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call_driver(cuda, "cuCtxPushCurrent_v2", context)
    call_driver(cuda, "cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    call_driver(cuda, "cuCtxPopCurrent_v2", ctypes.byref(context))
    if _attribute(cuda, _INTEGRATED, device):
        # A Jetson's "free" leaves out what the page cache would give back.
        return max(free.value, _meminfo()["MemAvailable"]), total.value
    return free.value, total.value


def _attribute(cuda: ctypes.CDLL, attribute: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    call_driver(cuda, "cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
    return value.value


def call_driver(cuda: ctypes.CDLL, name: str, *arguments: object) -> None:
    """Call a function of the driver's library; `BitMTPError` where it is missing or fails."""
    try:
        status = getattr(cuda, name)(*arguments)
    except AttributeError:
        raise BitMTPError("the NVIDIA driver is not usable: its library is incomplete") from None
    if status != 0:
        raise BitMTPError(f"the NVIDIA driver fails: {name} says {status}")


def _cudart_major() -> int:
    _, contents, header = tvm_cuda_library()
    names = [n for n in elf.needed(contents, header) if n.startswith("libcudart.so.")]
    return int(names[0].rsplit(".", 1)[1]) if names else 0


def _meminfo() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        pairs = (line.split(":") for line in lines)
        return {key: int(value.split()[0]) * 1024 for key, value in pairs}
    except (OSError, ValueError):
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return {"MemTotal": pages, "MemAvailable": pages}


def cpu_features() -> frozenset[str]:
    """The features that every processor of this machine has, as /proc/cpuinfo spells them."""
    if platform.machine() == "aarch64":
        # An emulator may show the file of the machine around it, but never that machine's vector.
        bits = _getauxval(_AT_HWCAP)
        return frozenset(name for name, bit in _HWCAP_BITS.items() if bits >> bit & 1)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    sets = [
        frozenset(line.split(":", 1)[1].split())
        for line in lines
        if line.split(":")[0].strip() == "flags"
    ]
    return frozenset.intersection(*sets) if sets else frozenset()


def _getauxval(kind: int) -> int:
    getauxval = ctypes.CDLL("libc.so.6").getauxval
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return int(getauxval(kind))
