"""The devices that can be compiled for: one literal table, and its translation into TVM targets."""

import platform
from dataclasses import dataclass, replace
from typing import Any

from bitmtp_tvm.errors import UsageError

GIB = 1 << 30
MIB = 1 << 20
KIB = 1 << 10

DEFAULT_WIDTHS = (1, 2, 4, 8, 16)
# Where wide steps are cheap: masks for every outcome of 8 drafts need some 60 rows.
WIDE_WIDTHS = (*DEFAULT_WIDTHS, 32, 64)
DEFAULT_PREFILL = (128,)
# Four times the rows take little more than twice the time of 128 where a card has many cores.
WIDE_PREFILL = (*DEFAULT_PREFILL, 512)


@dataclass(frozen=True)
class Host:
    """The processor that runs the host code; features are spelled as in /proc/cpuinfo."""

    triple: str
    mcpu: str
    mattr: tuple[str, ...]
    features: tuple[str, ...]


# The host code of a GPU artifact only launches kernels, so any x86-64 processor will do for it.
X86_64 = Host("x86_64-linux-gnu", "x86-64", (), ())
X86_64_V3 = Host(
    "x86_64-linux-gnu",
    "x86-64-v3",
    (),
    ("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"),
)
# Every aarch64 board of interest has the 8-bit dot product, which the ternary kernels live on.
AARCH64 = Host("aarch64-linux-gnu", "generic", ("+neon", "+dotprod"), ("asimd", "asimddp"))
ORIN_HOST = Host("aarch64-linux-gnu", "cortex-a78ae", (), ("asimd", "asimddp", "atomics"))

CPU_HOSTS = {"x86_64": X86_64_V3, "aarch64": AARCH64}


@dataclass(frozen=True)
class Target:
    """One device, as `--target` names it.

    `kind` is TVM's ("llvm" or "cuda"), `arch` the GPU architecture ("" for the processor). Sizes
    are bytes, `bandwidth_gbs` is 10^9 bytes a second; a number that a processor has no use for is
    0. `widths` are the default decode buckets, `prefill` the default chunk widths, both ascending.
    """

    name: str
    kind: str
    arch: str
    description: str
    host: Host
    multiprocessors: int = 0
    bandwidth_gbs: float = 0.0
    l2_bytes: int = 0
    memory_bytes: int = 0
    shared_memory_per_block: int = 0
    registers_per_sm: int = 0
    widths: tuple[int, ...] = DEFAULT_WIDTHS
    prefill: tuple[int, ...] = DEFAULT_PREFILL

    @property
    def host_triple(self) -> str:
        return self.host.triple

    @property
    def host_mcpu(self) -> str:
        return self.host.mcpu

    @property
    def host_features(self) -> tuple[str, ...]:
        return self.host.features

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """`(8, 7)` for sm_87, `(9, 0)` for sm_90a, None for a processor."""
        return parse_arch(self.arch) if self.kind == "cuda" else None


def parse_arch(arch: str) -> tuple[int, int]:
    """Compute capability that the name of an architecture stands for: `sm_90a` is `(9, 0)`."""
    digits = arch.removeprefix("sm_").rstrip("af")
    return int(digits[:-1]), int(digits[-1])


# The largest dynamic shared memory that one block may ask for, by architecture.
SHARED_MEMORY = {
    "sm_80": 163 * KIB,
    "sm_86": 99 * KIB,
    "sm_87": 163 * KIB,
    "sm_89": 99 * KIB,
    "sm_90a": 227 * KIB,
}


def _gpu(
    name: str,
    arch: str,
    description: str,
    multiprocessors: int,
    bandwidth_gbs: float,
    l2_mib: int,
    memory_gib: int,
    host: Host = X86_64,
    widths: tuple[int, ...] = WIDE_WIDTHS,
    prefill: tuple[int, ...] = WIDE_PREFILL,
) -> Target:
    return Target(
        name=name,
        kind="cuda",
        arch=arch,
        description=description,
        host=host,
        multiprocessors=multiprocessors,
        bandwidth_gbs=bandwidth_gbs,
        l2_bytes=l2_mib * MIB,
        memory_bytes=memory_gib * GIB,
        shared_memory_per_block=SHARED_MEMORY[arch],
        registers_per_sm=65536,
        widths=widths,
        prefill=prefill,
    )


ORIN = (ORIN_HOST, DEFAULT_WIDTHS, DEFAULT_PREFILL)

# Data sheet figures, for tile choices and predictions; what fits is decided by the memory that is
# free on the device. The Orins share their memory with the processor.
TARGETS: dict[str, Target] = {
    "cpu": Target(
        name="cpu",
        kind="llvm",
        arch="",
        description="the processor of the machine that compiles",
        host=CPU_HOSTS.get(platform.machine(), X86_64_V3),
    ),
    "cpu-aarch64": Target(
        name="cpu-aarch64",
        kind="llvm",
        arch="",
        description="the processor of an aarch64 machine",
        host=AARCH64,
    ),
    "h20": _gpu("h20", "sm_90a", "NVIDIA H20", 78, 4000, 60, 96),
    "h200": _gpu("h200", "sm_90a", "NVIDIA H200", 132, 4800, 60, 141),
    "h100": _gpu("h100", "sm_90a", "NVIDIA H100 SXM", 132, 3350, 50, 80),
    "a100": _gpu("a100", "sm_80", "NVIDIA A100 80GB", 108, 2039, 40, 80),
    "4090": _gpu("4090", "sm_89", "NVIDIA GeForce RTX 4090", 128, 1008, 72, 24),
    "3090": _gpu("3090", "sm_86", "NVIDIA GeForce RTX 3090", 82, 936, 6, 24),
    "orin": _gpu("orin", "sm_87", "NVIDIA Jetson AGX Orin 64GB", 16, 204.8, 4, 64, *ORIN),
    "orin-nx": _gpu("orin-nx", "sm_87", "NVIDIA Jetson Orin NX 16GB", 8, 102.4, 2, 16, *ORIN),
    # 68 GB/s is the power mode that every JetPack has; the newer one reaches 102.
    "orin-nano": _gpu("orin-nano", "sm_87", "NVIDIA Jetson Orin Nano 8GB", 8, 68, 2, 8, *ORIN),
}


def get_target(name: str) -> Target:
    """Look a target up; `UsageError` lists the known ones."""
    try:
        return TARGETS[name]
    except KeyError:
        known = ", ".join(TARGETS)
        raise UsageError(f"unknown target {name!r}: choose one of {known}") from None


def with_buckets(
    target: Target, widths: tuple[int, ...] | None, prefill: tuple[int, ...] | None = None
) -> Target:
    """The same device with other decode widths or prefill chunks; None keeps the default."""
    return replace(target, widths=widths or target.widths, prefill=prefill or target.prefill)


def tvm_target(target: Target) -> Any:
    """The `tvm.target.Target` of a table row, host included."""
    import tvm

    host: dict[str, Any] = {
        "kind": "llvm",
        "mtriple": target.host.triple,
        "mcpu": target.host.mcpu,
    }
    if target.host.mattr:
        host["mattr"] = list(target.host.mattr)
    if target.kind == "llvm":
        return tvm.target.Target(host, host=host)
    return tvm.target.Target(
        {
            "kind": "cuda",
            "arch": target.arch,
            "max_num_threads": 1024,
            "max_threads_per_block": 1024,
            "thread_warp_size": 32,
            "max_shared_memory_per_block": target.shared_memory_per_block,
            "registers_per_block": target.registers_per_sm,
            "l2_cache_size_bytes": target.l2_bytes,
            "host": host,
        }
    )
