"""Compiles the CUDA text that TVM generates, with the NVRTC of the wheels."""

import importlib.metadata
import sys
from dataclasses import dataclass
from typing import Any

from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.libraries import wheel_file
from bitmtp_tvm.overlap import overlaps, tag_launches, with_waits

COMPILER = "nvidia-cuda-nvrtc-cu12"
HEADERS = (
    ("nvidia-cuda-runtime-cu12", "nvidia/cuda_runtime/include"),
    # Generated code includes cuda/std/*.
    ("nvidia-cuda-cccl-cu12", "nvidia/cuda_cccl/include"),
)
INSTALL = "pip install -e '.[compile]' in the checkout of this package"

# What nvcc gives generated code for free and NVRTC does not.
PREAMBLE = """\
#include <cuda/std/cstdint>
#include <cuda/std/limits>
using cuda::std::int8_t; using cuda::std::uint8_t;
using cuda::std::int16_t; using cuda::std::uint16_t;
using cuda::std::int32_t; using cuda::std::uint32_t;
using cuda::std::int64_t; using cuda::std::uint64_t;
#define __asm__ asm
#define __volatile__ volatile
#ifndef INFINITY
#define INFINITY (::cuda::std::numeric_limits<float>::infinity())
#endif
"""

PTXAS = ("-v", "--register-usage-level=10", "--warn-on-local-memory-usage")
HALF_MACROS = ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_OPERATORS", "BFLOAT16_CONVERSIONS")


def include_directories() -> list[str]:
    """The header folders of the wheels; `BitMTPError` if one is missing."""
    found = []
    for distribution, name in HEADERS:
        folder = wheel_file(distribution, name)
        if folder is None:
            raise BitMTPError(f"the CUDA headers ({distribution}) are not installed: {INSTALL}")
        found.append(str(folder))
    return found


def compile_options(arch: str, fast_math: bool = False) -> list[str]:
    """NVRTC's options for machine code of `arch` ("sm_87")."""
    options = [f"--gpu-architecture={arch}", "-default-device", "--device-int128"]
    # Generated code is full of variables that are never read.
    options.append("--diag-suppress=177")
    options += [f"-I{folder}" for folder in include_directories()]
    options += [f"-U__CUDA_NO_{name}__" for name in HALF_MACROS]
    options += [f"--ptxas-options={flag}" for flag in PTXAS]
    if fast_math:
        options.append("--use_fast_math")
    return options


def compile_cubin(source: str, arch: str, fast_math: bool = False) -> tuple[bytes, str]:
    """Compile CUDA text to a cubin; returns it and the compiler's log. See `_compile`."""
    return _compile(source, compile_options(arch, fast_math), "CUBIN")


def compile_ptx(source: str, arch: str, fast_math: bool = False) -> tuple[bytes, str]:
    """Compile CUDA text to the PTX of `arch` ("sm_87" gives that of compute_87).

    The driver of any later card compiles it: for checking one card's kernels on another, never for
    an artifact. See `_compile`.
    """
    options = compile_options(arch.replace("sm_", "compute_"), fast_math)
    kept = [option for option in options if not option.startswith("--ptxas-options")]
    return _compile(source, kept, "PTX")


def _compile(source: str, options: list[str], form: str) -> tuple[bytes, str]:
    """Machine code ("CUBIN") or "PTX" of CUDA text, and the compiler's log.

    Raises `BitMTPError` with the compiler's messages when the text does not compile, and when NVRTC
    is missing or is not the one whose wheel is installed.
    """
    nvrtc = load_nvrtc()
    text = PREAMBLE + source.replace("#include <cuda.h>", "")
    program = _check(nvrtc, nvrtc.nvrtcCreateProgram(text.encode(), b"kernels.cu", 0, None, None))
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        size = _check(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))
        log = bytearray(size)
        _check(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
        messages = log.decode(errors="replace").strip("\0 \n")
        if int(status) != 0:
            arch = options[0].partition("=")[2]
            raise BitMTPError(f"a generated kernel does not compile for {arch}: {messages}")
        code = bytearray(_check(nvrtc, getattr(nvrtc, f"nvrtcGet{form}Size")(program)))
        _check(nvrtc, getattr(nvrtc, f"nvrtcGet{form}")(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(code), messages


def load_nvrtc() -> Any:
    """NVIDIA's bindings of NVRTC, checked to run the library of the installed wheel."""
    try:
        from cuda.bindings import nvrtc

        wheel = importlib.metadata.version(COMPILER)
        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, importlib.metadata.PackageNotFoundError) as fault:
        raise BitMTPError(f"NVRTC is not usable ({fault}): {INSTALL}") from fault
    if int(status) != 0 or wheel.split(".")[:2] != [str(major), str(minor)]:
        raise BitMTPError(
            f"NVRTC {major}.{minor} was found instead of the wheel's {wheel}: remove the other one "
            "from LD_LIBRARY_PATH"
        )
    return nvrtc


@dataclass
class Compilation:
    """What became of the CUDA text that TVM handed over last."""

    failure: BitMTPError | None = None


def register_nvrtc(
    verbose: bool = False, fast_math: bool = False, ptx: bool = False
) -> Compilation:
    """Make TVM compile CUDA through `compile_cubin`, or `compile_ptx`, for the current target.

    Build inside `with target:`. With `verbose` the compiler's log goes to stderr: warnings, and the
    registers and spills of every kernel. Kernels of cards that can are launched early
    (bitmtp_tvm/overlap.py). TVM turns an exception of the callback into a
    `RuntimeError`; the returned object keeps the original.
    """
    # TVM registers its own callback when this module is imported; ours has to come after it.
    import tvm.support.nvcc
    import tvm_ffi

    state = Compilation()

    def compile_current(source: str) -> bytes:
        target = tvm.target.Target.current(allow_none=True)
        if target is None or "arch" not in target.attrs:
            raise RuntimeError("no CUDA target is current: build inside `with target:`")
        try:
            arch = str(target.attrs["arch"])
            compiler = compile_ptx if ptx else compile_cubin
            text = with_waits(source) if overlaps(arch) else source
            code, log = compiler(text, arch, fast_math)
        except BitMTPError as fault:
            state.failure = fault
            raise
        if verbose and log:
            print(log, file=sys.stderr)
        return code

    tvm_ffi.register_global_func("tvm_callback_cuda_compile", compile_current, override=True)
    tag_launches()
    return state


def _check(nvrtc: Any, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status) != 0:
        (_, message) = nvrtc.nvrtcGetErrorString(status)
        raise BitMTPError(f"NVRTC failed: {message.decode()}")
    return values[0] if values else None
