"""What compile prints at the end: sizes, memory, drivers, and the origin of every schedule."""

from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from bitmtp_tvm.manifest import KernelRecord, Manifest
from bitmtp_tvm.records import FIXED, MEASURED, RULE, TRANSFERRED

if TYPE_CHECKING:
    from bitmtp_tvm.build import BuildReport

ORDER = (MEASURED, TRANSFERRED, RULE, FIXED)


def print_report(
    directory: Path, manifest: Manifest, built: "BuildReport", verbose: bool = False
) -> None:
    """Print the summary on stdout; with `verbose` also what every kernel is made with, and every
    machine-code kernel's resources."""
    for line in lines(directory, manifest, built):
        print(line)
    if verbose:
        for record in manifest.kernels:
            print(f"  {made_with(record)}")
        for kernel in built.kernels:
            print(f"  {kernel}")


def lines(directory: Path, manifest: Manifest, built: "BuildReport") -> list[str]:
    memory = manifest.memory
    shards = sum(shard.bytes for shard in manifest.shards)
    return [
        f"{directory}: {manifest.model} for {manifest.target} ({machine(manifest)})",
        f"  model.so {mib(built.so_bytes)}, parameters {mib(shards)} "
        f"in {len(manifest.shards)} files",
        f"  memory at a context of {manifest.context}: {mib(memory.total)} = parameters "
        f"{mib(memory.parameters)} + KV {mib(memory.kv)} + workspace {mib(memory.workspace)}"
        + (", beside the driver's own" if manifest.kind == "cuda" else ""),
        *driver_lines(manifest),
        f"  kernels: {len(manifest.kernels)} ({counts(manifest.kernels)})",
        *kernel_lines(manifest.kernels),
    ]


def machine(manifest: Manifest) -> str:
    host = manifest.host_triple.split("-")[0]
    return f"{manifest.arch}, {host} host" if manifest.kind == "cuda" else host


def driver_lines(manifest: Manifest) -> list[str]:
    if manifest.kind != "cuda":
        return []
    least = manifest.least_drivers
    return [
        f"  machine code of CUDA {manifest.versions['toolkit']} for driver "
        f"{least['machine_code']} or newer; TVM's wheel needs {least['runtime']} or newer"
    ]


def counts(kernels: tuple[KernelRecord, ...]) -> str:
    """Kernels by where they come from: "412 measured on h200, 30 rule"."""
    found = Counter((ORDER.index(kernel.provenance), kernel.origin) for kernel in kernels)
    return ", ".join(f"{number} {origin}" for (_, origin), number in sorted(found.items()))


def made_with(kernel: KernelRecord) -> str:
    """A kernel's template and arguments on one line."""
    arguments = [f"{name}={value}" for name, value in kernel.arguments.items()]
    words = [f"{kernel.name}:", kernel.template, *arguments, f"({kernel.origin})"]
    return " ".join(word for word in words if word)


def kernel_lines(kernels: tuple[KernelRecord, ...]) -> list[str]:
    """One line for each operation and provenance: the widths that it has kernels for."""
    found: dict[tuple[str, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for kernel in kernels:
        found[kernel.op, kernel.provenance][kernel.width] += 1
    return [
        f"    {op:<20} {provenance:<12} "
        + " ".join(f"w{w}" + (f"x{n}" if n > 1 else "") for w, n in sorted(widths.items()))
        for (op, provenance), widths in sorted(found.items())
    ]


def mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
