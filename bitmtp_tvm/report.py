"""What compile prints at the end: sizes, memory, drivers, and the origin of every schedule."""

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from bitmtp_tvm.manifest import KernelRecord, Manifest

if TYPE_CHECKING:
    from bitmtp_tvm.build import BuildReport


def print_report(
    directory: Path, manifest: Manifest, built: "BuildReport", verbose: bool = False
) -> None:
    """Print the summary on stdout; with `verbose` also every machine-code kernel's resources."""
    for line in lines(directory, manifest, built):
        print(line)
    if verbose:
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
        f"  kernels: {len(manifest.kernels)} ("
        + ", ".join(f"{count} {name}" for name, count in sorted(manifest.counts.items()))
        + ")",
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
