"""Finds NVIDIA machine code inside a file and reads what it is for and what it needs."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from bitmtp_tvm import elf

# Attributes of `.nv.info` sections. A record is a format byte, an attribute byte and two bytes of
# value; in the format 4 those two bytes are the length of a payload that follows.
_PAYLOAD = 4
_FRAME_SIZE = 0x11
_REGISTERS = 0x2F
_TOOLKIT = 0x37

# From sm_90 on the system keeps the first KiB of a block's shared memory for itself.
_HOPPER = 90
_RESERVED_SHARED = 1024


@dataclass(frozen=True)
class Kernel:
    """What one kernel takes: registers and stack bytes a thread, static shared bytes a block.

    The stack (local memory) holds spilled registers and arrays that are indexed at run time.
    """

    name: str
    registers: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Cubin:
    """One cubin: `sm` is 87 for sm_87 and sm_87a, `toolkit` is (12, 6) for CUDA 12.6."""

    sm: int
    abi_version: int
    toolkit: tuple[int, int]
    kernels: tuple[Kernel, ...]
    size: int


def find_cubins(buffer: bytes) -> list[Cubin]:
    """Every cubin embedded in `buffer` (bytes or a memory map), in order.

    Raises `elf.ElfError` for one that is cut short.
    """
    found = []
    at = buffer.find(elf.MAGIC)
    while at >= 0:
        if int.from_bytes(buffer[at + 18 : at + 20], "little") == 190:
            found.append(parse_cubin(buffer, at))
        at = buffer.find(elf.MAGIC, at + 1)
    return found


def parse_cubin(buffer: bytes, base: int = 0) -> Cubin:
    """Read the cubin at `base`."""
    header = elf.parse(buffer, base)
    # Toolkits before 13 keep the architecture in the low byte of the flags, later ones beside it.
    shift = 0 if header.abi_version < 8 else 8
    sm = header.flags >> shift & 0xFF
    kernels = tuple(_kernels(buffer, header, sm))
    return Cubin(sm, header.abi_version, _toolkit(buffer, header), kernels, header.size)


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        length = value if form == _PAYLOAD else 0
        yield attribute, data[at + 4 : at + 4 + length]
        at += 4 + length


def _by_symbol(data: bytes, wanted: int) -> dict[int, int]:
    pairs = (struct.unpack("<II", p) for kind, p in _records(data) if kind == wanted)
    return dict(pairs)


def _kernels(buffer: bytes, header: elf.Elf, sm: int) -> Iterator[Kernel]:
    info, table = header.section(".nv.info"), header.section(".symtab")
    if info is None or table is None:
        return
    data = header.data(buffer, info)
    names = [symbol.name for symbol in elf.symbols(buffer, header, table)]
    frames = _by_symbol(data, _FRAME_SIZE)
    for symbol, registers in sorted(_by_symbol(data, _REGISTERS).items()):
        shared = header.section(f".nv.shared.{names[symbol]}")
        size = shared.size if shared else 0
        if sm >= _HOPPER:
            size = max(0, size - _RESERVED_SHARED)
        yield Kernel(names[symbol], registers, frames.get(symbol, 0), size)


def _toolkit(buffer: bytes, header: elf.Elf) -> tuple[int, int]:
    for section in header.sections:
        if section.name.startswith(".nv.info."):
            for kind, payload in _records(header.data(buffer, section)):
                if kind == _TOOLKIT:
                    return divmod(struct.unpack("<I", payload)[0], 10)
    return (0, 0)
