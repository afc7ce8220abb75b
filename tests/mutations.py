"""Random damage to files, and what a reader may make of it."""

import random
import resource
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from bitmtp_tvm.errors import BitMTPError

# Counts, lengths and sizes that tempt a reader to allocate or to loop.
EXTREMES = (
    0,
    1,
    2,
    42,
    143,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)


def damage(whole: bytes, regions: list[range], chance: random.Random) -> bytes:
    """`whole` with one fault in one of `regions`: bytes changed, lost, added, moved, or cut off."""
    data = bytearray(whole)
    place = chance.choice(chance.choice(regions))
    length = chance.randrange(1, 64)
    match chance.randrange(6):
        case 0:
            for _ in range(chance.choice((1, 1, 2, 8))):
                data[chance.choice(chance.choice(regions))] = chance.randrange(256)
        case 1:
            size = chance.choice((4, 8))
            data[place : place + size] = struct.pack("<Q", chance.choice(EXTREMES))[:size]
        case 2:
            del data[chance.choice((place, chance.randrange(len(data)))) :]
        case 3:
            del data[place : place + length]
        case 4:
            data[place:place] = chance.randbytes(length)
        case _:
            source = chance.choice(chance.choice(regions))
            data[place : place + length] = data[source : source + length]
    return bytes(data)


def survive(path: Path, contents: Iterable[bytes], read: Callable[[Path], object]) -> list[str]:
    """Every file is read, or refused in one short sentence, soon and in little memory.

    Returns the sentences, "" for what was read.
    """
    said = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for data in contents:
        path.write_bytes(data)
        start = time.perf_counter()
        try:
            read(path)
            said.append("")
        except BitMTPError as fault:
            said.append(str(fault))
            assert "\n" not in said[-1] and len(said[-1]) < 600
        assert time.perf_counter() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KiB
    return said
