"""Five thousand damaged safetensors files: each is refused in one sentence, or read."""

import json
import random

import numpy as np
import pytest
import safetensors_bytes
from mutations import damage, survive
from safetensors import SafetensorError, safe_open

from bitmtp_tvm.checkpoint.safetensors_file import DTYPES, SafetensorsFile


def tensors(chance):
    """One tensor of every element type, of one to three dimensions."""
    made = {}
    for place, dtype in enumerate(DTYPES):
        shape = [chance.randrange(1, 5) for _ in range(1 + place % 3)]
        size = int(np.prod(shape)) * np.dtype(DTYPES[dtype]).itemsize
        name = f"model.layers.{place}.weight"
        made[name] = {"dtype": dtype, "shape": shape, "data": chance.randbytes(size)}
    return made


def structured(made, chance):
    """The file with one field of its header replaced."""
    start, header = 0, {}
    for name, entry in made.items():
        span = [start, start + len(entry["data"])]
        header[name] = {"dtype": entry["dtype"], "shape": entry["shape"], "data_offsets": span}
        start = span[1]
    name = chance.choice(list(header))
    strange = [None, True, -1, 0, 1, 2**31, 2**63, 2**70, 1.5, 1e400, "", "F32", [], [0], [-4, 0]]
    strange += [[2**40, 2**40], [[1]], {}, "x" * 5000, [2**62, 4], [0] * 300, [1] * 300, [2**70, 0]]
    header[name][chance.choice(list(header[name]))] = chance.choice(strange)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(e["data"] for e in made.values())


def read(path):
    file = SafetensorsFile(path)
    for name in file.entries:
        file.read(name)


def test_five_thousand_damaged_files(tmp_path):
    chance = random.Random(7)
    made = tensors(chance)
    path = tmp_path / "model.safetensors"
    safetensors_bytes.save(path, made)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")

    def contents():
        for place in range(5000):
            regions = [range(8), range(header), range(header)]
            yield structured(made, chance) if place % 2 else damage(whole, regions, chance)

    said = survive(path, contents(), read)
    assert len(said) == 5000 and 50 < said.count("") < 2500


def test_what_is_read_is_read_by_the_library_too(tmp_path):
    """A damaged file that still opens is one that the format allows."""
    chance = random.Random(8)
    made = tensors(chance)
    path = tmp_path / "model.safetensors"
    safetensors_bytes.save(path, made)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")

    def read_by_both(path):
        read(path)
        try:
            with safe_open(path, framework="numpy") as file:
                assert set(file.keys()) == set(SafetensorsFile(path).entries)
        except SafetensorError as fault:
            pytest.fail(f"the library refuses what was read: {fault}")

    files = (damage(whole, [range(header)], chance) for _ in range(1000))
    assert "" in survive(path, files, read_by_both)
