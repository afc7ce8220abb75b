"""The compilers and linkers, all from wheels: what they need before they can be used.

Nothing here looks at the machine's own compilers, so every machine builds the same bytes.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bitmtp_tvm import elf
from bitmtp_tvm.cache import cache_directory
from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.libraries import import_tvm, load_tvm_cuda, tvm_cuda_library
from bitmtp_tvm.nvrtc import INSTALL, include_directories, load_nvrtc, register_nvrtc

__all__ = [
    "cache_directory",
    "cross_compiler",
    "prepare_cuda",
    "register_nvrtc",
    "require_compilers",
    "versions",
    "zig",
]

# Nothing of libc is linked in, so this only keeps the linker from guessing by the build machine.
GLIBC = "2.31"

PACKAGES = {
    "package": "bitmtp-tvm",
    "tvm": "apache-tvm",
    "tvm_ffi": "apache-tvm-ffi",
    "toolkit": "nvidia-cuda-nvrtc-cu12",
    "linker": "ziglang",
}


def versions() -> dict[str, str]:
    """Versions of what an artifact is made with; "" for a package that is not installed."""
    found = {}
    for key, name in PACKAGES.items():
        try:
            found[key] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[key] = ""
    return found


def zig_program() -> Path:
    """The zig of the `ziglang` wheel; `BitMTPError` if it is not installed."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        raise BitMTPError(f"the linker (ziglang) is not installed: {INSTALL}")
    return Path(spec.origin).with_name("zig")


def zig(arguments: Sequence[str], folder: Path) -> None:
    """Run the zig of the `ziglang` wheel in `folder`, deaf to the machine's environment.

    Raises `BitMTPError` with zig's own words when it fails.
    """
    program = zig_program()
    # Zig insists on a cache; nothing here takes long enough to be worth keeping in one.
    with tempfile.TemporaryDirectory() as cache:
        environment = {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}
        command = [str(program), *arguments]
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
        except OSError as fault:
            raise BitMTPError(f"{program} cannot be run: {fault}") from fault
    if done.returncode != 0:
        raise BitMTPError(f"linking failed: {done.stderr.strip() or f'exit {done.returncode}'}")


def cross_compiler(triple: str) -> Callable[..., None]:
    """The `fcompile` of `export_library` that links a shared library for `triple`.

    Objects and assembler sources are linked in the given order, without libc and without symbols;
    native and foreign hosts go the same way.
    """

    def link(output: str, objects: Sequence[str], options: Sequence[str] | None = None) -> None:
        target = ["-target", f"{triple}.{GLIBC}"]
        flags = ["-shared", "-fPIC", "-s", "-nostdlib", *(options or ())]
        files = [os.path.abspath(name) for name in objects]
        folder = Path(files[0]).parent
        zig(["cc", *target, *flags, "-o", os.path.abspath(output), *files], folder)

    return link


def require_compilers(kind: str) -> None:
    """Make sure, before any work, that all that a target of `kind` is built with is installed.

    Raises `BitMTPError` that names what is missing and how to get it.
    """
    zig_program()
    if kind == "cuda":
        load_nvrtc()
        include_directories()
        prepare_cuda()
    else:
        _check_tvm_compiler()


def prepare_cuda() -> None:
    """Make TVM able to compile CUDA here, on a machine with or without a GPU.

    Best called before the first `import tvm`, and in every worker process: a TVM without its CUDA
    part packs source text into the artifact without a word. Raises `BitMTPError` when the parts
    cannot be had or when a device's own driver is out of order.
    """
    if "TVM_COMPILE_FORCE_FALLBACK" in os.environ:
        raise BitMTPError(
            "TVM_COMPILE_FORCE_FALLBACK makes TVM pack source text, not machine code: unset it"
        )
    load_tvm_cuda(make_stub=_driver_stub)
    _check_tvm_compiler()


def _check_tvm_compiler() -> None:
    import_tvm()
    import tvm

    if tvm.base._RUNTIME_ONLY:
        raise BitMTPError(
            "this TVM has no compiler (libtvm_compiler.so): pip install apache-tvm==0.27.0.post1, "
            "with TVM_USE_RUNTIME_LIB unset"
        )


def _driver_stub() -> Path:
    """A libcuda whose functions all say "no device", built once and kept in the cache."""
    _, contents, header = tvm_cuda_library()
    names = [name for name in elf.undefined_symbols(contents, header) if _is_driver_function(name)]
    # cuInit is what libcudart asks first.
    functions = [f"int {name}(void) {{ return 100; }}" for name in (*names, "cuInit")]
    source = "\n".join(functions) + "\n"
    key = hashlib.sha256((source + versions()["linker"]).encode()).hexdigest()[:16]
    stub = cache_directory() / f"driver-stub-{key}.so"
    if not stub.exists():
        _build_stub(source, stub)
    return stub


def _is_driver_function(name: str) -> bool:
    return name.startswith("cu") and name[2:3].isupper()


def _build_stub(source: str, stub: Path) -> None:
    with tempfile.TemporaryDirectory(dir=stub.parent) as name:
        folder = Path(name)
        (folder / "stub.c").write_text(source)
        soname = "-Wl,-soname,libcuda.so.1"
        zig(["cc", "-shared", "-nostdlib", soname, "-o", "stub.so", "stub.c"], folder)
        # Another process may do the same at the same time: the last one wins, with equal bytes.
        os.replace(folder / "stub.so", stub)
