"""A scheduled module becomes one shared library: compile, link, and look at what came out."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitmtp_tvm import elf
from bitmtp_tvm.cubin import Cubin, Kernel, find_cubins
from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.manifest import MARKER, embedded_manifest
from bitmtp_tvm.targets import Target, parse_arch, tvm_target
from bitmtp_tvm.toolchain import cross_compiler, prepare_cuda, register_nvrtc, versions

# Cubins of a 12.x toolkit load from driver 525 on; TVM's wheel is linked against the runtime of
# CUDA 13, which wants 580.
LEAST_DRIVERS = {"machine_code": 525, "runtime": 580}
# ELF ABI of the cubins that drivers from 525 on understand; toolkits from 13 on write version 8.
CUBIN_ABI = 7


@dataclass(frozen=True)
class BuildReport:
    """What is in a library. `kernels` are the device functions.

    For a cpu `arch` and `toolkit` are "", `least_drivers` and `kernels` empty.
    """

    so_bytes: int
    machine: str
    cubins: int
    arch: str
    toolkit: str
    least_drivers: dict[str, int]
    kernels: tuple[Kernel, ...]


def build(
    mod: Any,
    target: Target,
    out: Path,
    progress: Callable[[str], None] | None = None,
    *,
    manifest: str = "",
    pass_config: dict[str, Any] | None = None,
    fast_math: bool = False,
    verbose: bool = False,
) -> BuildReport:
    """Build the lowered IRModule `mod` for `target` into the shared library `out`.

    `manifest` is the text to put inside, `pass_config` is TVM's PassContext config, and `progress`
    is told each phase. Nothing schedules what the module leaves unscheduled. `out` appears only
    when it has passed `check_library`; the same input gives the same bytes.
    """
    say = progress or (lambda _: None)
    say("compile")
    executable = compile_module(mod, target, pass_config, fast_math, verbose)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as name:
        made = Path(name) / out.name
        say("link")
        link(executable, target, made, manifest)
        say("check")
        report = check_library(made, target, manifest)
        os.replace(made, out)
    return report


def compile_module(
    mod: Any,
    target: Target,
    pass_config: dict[str, Any] | None = None,
    fast_math: bool = False,
    verbose: bool = False,
) -> Any:
    """Compile a lowered IRModule (bitmtp_tvm/pipeline.py) into a `relax` executable in memory."""
    compilation = None
    if target.kind == "cuda":
        prepare_cuda()
        compilation = register_nvrtc(verbose, fast_math)
    import tvm
    from tvm import relax

    described = tvm_target(target)
    try:
        with described, tvm.transform.PassContext(opt_level=3, config=pass_config or {}):
            return relax.build(
                mod, described, relax_pipeline=None, exec_mode="bytecode", system_lib=False
            )
    except Exception:
        if compilation and compilation.failure:
            raise compilation.failure from None
        raise


def link(executable: Any, target: Target, out: Path, manifest: str = "") -> None:
    """Link an executable, with the text of its manifest inside, into the shared library `out`."""
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "manifest.s"
        source.write_text(manifest_source(manifest))
        executable.export_library(
            str(out),
            fcompile=cross_compiler(target.host.triple),
            # export_library appends its own objects to this very list.
            addons=[str(source)],
            workspace_dir=name,
        )


def manifest_source(text: str) -> str:
    """Assembler for an exported array: the marker, the text in UTF-8, a zero byte.

    Exported, so that no linker drops it; spelled out byte by byte, so that it needs neither an
    assembler's escapes nor a second file.
    """
    data = MARKER + text.encode() + b"\0"
    rows = [", ".join(map(str, data[at : at + 32])) for at in range(0, len(data), 32)]
    return "\n".join(
        [
            '    .section .rodata.bitmtp_manifest,"a",%progbits',
            "    .globl bitmtp_manifest",
            "    .type bitmtp_manifest, %object",
            "bitmtp_manifest:",
            *(f"    .byte {row}" for row in rows),
            "    .size bitmtp_manifest, . - bitmtp_manifest",
            '    .section .note.GNU-stack,"",%progbits',
            "",
        ]
    )


def check_library(path: Path, target: Target, manifest: str = "") -> BuildReport:
    """Make sure that the library is what was asked for; `BitMTPError` says what is not.

    Checked: the host's machine, that nothing but TVM and libc is left to be found at load time, the
    embedded manifest, and for a GPU that there is machine code, of this arch and toolkit, and no
    source text.
    """
    contents = path.read_bytes()
    header = elf.parse(contents)
    wanted = target.host.triple.split("-")[0]
    if header.machine != wanted:
        raise BitMTPError(f"{path.name} was linked for {header.machine} instead of {wanted}")
    _check_symbols(path, elf.undefined_symbols(contents, header))
    if embedded_manifest(path) != manifest:
        raise BitMTPError(f"{path.name} does not hold the manifest that was linked in")
    cubins = find_cubins(contents)
    kernels = tuple(kernel for cubin in cubins for kernel in cubin.kernels)
    if target.kind != "cuda":
        return BuildReport(len(contents), wanted, 0, "", "", {}, ())
    toolkit = versions()["toolkit"]
    _check_machine_code(path, contents, cubins, target.arch, toolkit)
    return BuildReport(
        len(contents), wanted, len(cubins), target.arch, toolkit, dict(LEAST_DRIVERS), kernels
    )


def _check_symbols(path: Path, names: list[str]) -> None:
    # A compiler's own helpers start with two underscores, and no process is sure to have them.
    bad = [n for n in names if n.startswith("__") and not n.lower().startswith("__tvm")]
    if bad:
        raise BitMTPError(f"{path.name} needs {', '.join(bad)}, which no library provides")


def _check_machine_code(
    path: Path, contents: bytes, cubins: list[Cubin], arch: str, toolkit: str
) -> None:
    if b"__global__" in contents:
        raise BitMTPError(f"{path.name} holds CUDA source text instead of machine code")
    if not cubins:
        raise BitMTPError(f"{path.name} holds no GPU machine code: the module has no GPU kernel")
    major, minor = parse_arch(arch)
    for cubin in cubins:
        if cubin.sm != major * 10 + minor:
            raise BitMTPError(f"{path.name} holds machine code for sm_{cubin.sm}, not for {arch}")
        made_by = ".".join(map(str, cubin.toolkit))
        if cubin.abi_version != CUBIN_ABI or made_by != ".".join(toolkit.split(".")[:2]):
            raise BitMTPError(
                f"{path.name} holds machine code of CUDA {made_by}, not of the wheel's {toolkit}"
            )
