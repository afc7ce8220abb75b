"""Reads 64-bit little-endian ELF files: tells what a library is for, without loading it."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAGIC = b"\x7fELF\x02\x01"
MACHINES = {62: "x86_64", 183: "aarch64", 190: "cuda"}
NOBITS = 8
DYNAMIC = 6
DYNAMIC_SYMBOLS = 11
_NEEDED = 1

# The fields after the 16 identification bytes, and one entry of each table.
_HEADER = struct.Struct("<HHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_ENTRY = struct.Struct("<QQ")
_PROGRAM_BYTES = 56


class ElfError(ValueError):
    """The bytes are not a whole 64-bit little-endian ELF file."""


@dataclass(frozen=True)
class Section:
    """One section; `offset` is relative to the start of the ELF file."""

    name: str
    kind: int
    offset: int
    size: int
    link: int
    info: int


@dataclass(frozen=True)
class Elf:
    """The header and section table of an ELF file that starts at `base` of some buffer."""

    base: int
    machine: str
    abi_version: int
    version: int
    flags: int
    size: int
    sections: tuple[Section, ...]

    def section(self, name: str) -> Section | None:
        return next((section for section in self.sections if section.name == name), None)

    def data(self, buffer: bytes, section: Section) -> bytes:
        """The bytes of a section; empty for one that takes no room in the file."""
        if section.kind == NOBITS:
            return b""
        start = self.base + section.offset
        return bytes(buffer[start : start + section.size])


def parse(buffer: bytes, base: int = 0) -> Elf:
    """Parse the ELF file at `base` of `buffer` (bytes or a memory map).

    Raises `ElfError` when it is no ELF file of this kind or when its tables lie outside the buffer.
    """
    try:
        return _parse(buffer, base)
    except (struct.error, IndexError, UnicodeDecodeError) as fault:
        raise ElfError("damaged or truncated ELF file") from fault


def _parse(buffer: bytes, base: int) -> Elf:
    if buffer[base : base + len(MAGIC)] != MAGIC:
        raise ElfError("not a 64-bit little-endian ELF file")
    fields = _HEADER.unpack_from(buffer, base + 16)
    _, machine, version, _, program_at, section_at, flags, _, _, programs, _, count, names = fields
    raw = [
        _SECTION.unpack_from(buffer, base + section_at + i * _SECTION.size) for i in range(count)
    ]
    ends = [section_at + count * _SECTION.size, program_at + programs * _PROGRAM_BYTES]
    ends += [offset + size for _, kind, _, _, offset, size, *_ in raw if kind != NOBITS]
    if base + max(ends) > len(buffer):
        raise ElfError("truncated ELF file")
    labels = raw[names][4] if raw else 0
    sections = tuple(
        Section(_text(buffer, base + labels + name), kind, offset, size, link, info)
        for name, kind, _, _, offset, size, link, info, _, _ in raw
    )
    known = MACHINES.get(machine, f"machine {machine}")
    return Elf(base, known, buffer[base + 8], version, flags, max(ends), sections)


def _text(buffer: bytes, start: int) -> str:
    end = buffer.find(b"\0", start)
    return bytes(buffer[start:end]).decode()


@dataclass(frozen=True)
class Symbol:
    """A name of a symbol table; `section` is 0 for one that somebody else must define."""

    name: str
    section: int


def symbols(buffer: bytes, elf: Elf, table: Section) -> Iterator[Symbol]:
    """The entries of a symbol table, in order, the empty first one included."""
    strings = elf.base + elf.sections[table.link].offset
    for offset in range(0, table.size, _SYMBOL.size):
        fields = _SYMBOL.unpack_from(buffer, elf.base + table.offset + offset)
        yield Symbol(_text(buffer, strings + fields[0]), fields[3])


def undefined_symbols(buffer: bytes, elf: Elf) -> list[str]:
    """Names that a shared library expects others to define, sorted."""
    tables = [section for section in elf.sections if section.kind == DYNAMIC_SYMBOLS]
    found = {s.name for table in tables for s in symbols(buffer, elf, table) if s.section == 0}
    return sorted(found - {""})


def needed(buffer: bytes, elf: Elf) -> list[str]:
    """SONAMEs of the libraries that the loader must find first, in order."""
    tables = [section for section in elf.sections if section.kind == DYNAMIC]
    found = []
    for table in tables:
        strings = elf.base + elf.sections[table.link].offset
        for tag, value in _ENTRY.iter_unpack(elf.data(buffer, table)):
            if tag == _NEEDED:
                found.append(_text(buffer, strings + value))
    return found
