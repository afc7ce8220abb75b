import sys
from pathlib import Path

import pytest

from bitmtp_tvm import elf
from bitmtp_tvm.toolchain import cross_compiler, zig

SOURCE = """
    .text
    .globl here
here:
    .quad elsewhere
    .section .note.GNU-stack,"",%progbits
"""


@pytest.fixture(scope="module", params=["x86_64", "aarch64"])
def library(request, tmp_path_factory) -> tuple[str, bytes]:
    folder = tmp_path_factory.mktemp("elf")
    (folder / "source.s").write_text(SOURCE)
    link = cross_compiler(f"{request.param}-linux-gnu")
    link(str(folder / "out.so"), [str(folder / "source.s")], ["-Wl,-z,notext"])
    return request.param, (folder / "out.so").read_bytes()


def test_machine_symbols_and_needs(library: tuple[str, bytes]) -> None:
    machine, contents = library
    header = elf.parse(contents)
    assert header.machine == machine
    assert elf.undefined_symbols(contents, header) == ["elsewhere"]
    assert elf.needed(contents, header) == []
    assert header.size == len(contents)


def test_needed_names_other_libraries(tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text("int a(void) { return 1; }\n")
    (tmp_path / "b.c").write_text("int a(void); int b(void) { return a(); }\n")
    flags = ["cc", "-target", "x86_64-linux-gnu.2.31", "-shared", "-nostdlib"]
    zig([*flags, "-Wl,-soname,liba.so.7", "-o", "a.so", "a.c"], tmp_path)
    zig([*flags, "-o", "b.so", "b.c", "a.so"], tmp_path)
    contents = (tmp_path / "b.so").read_bytes()
    assert elf.needed(contents, elf.parse(contents)) == ["liba.so.7"]


def test_what_is_cut_short_or_no_elf_is_refused(library: tuple[str, bytes]) -> None:
    _, contents = library
    for bad in (b"", b"\x7fELF", contents[:40], contents[: len(contents) // 2], contents[:-1]):
        with pytest.raises(elf.ElfError):
            elf.parse(bad)
    with pytest.raises(elf.ElfError, match="not a 64-bit"):
        elf.parse(Path(__file__).read_bytes())


def test_a_real_program_parses() -> None:
    contents = Path(sys.executable).resolve().read_bytes()
    assert elf.parse(contents).machine in elf.MACHINES.values()
