import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from bitmtp_tvm import weights
from bitmtp_tvm.checkpoint import dense_shapes, matrix_shapes, random_checkpoint
from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.weights import (
    FUSED,
    pack_parameters,
    parameter_specs,
    rope_table,
    segments,
    write_parameters,
)
from relax_models.config import PRESETS
from relax_models.formats import LAYOUTS, unpack

CONFIG = replace(
    PRESETS["bitnet-2b"],
    vocab_size=37,
    hidden_size=72,
    intermediate_size=140,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=12,
)


@pytest.fixture(scope="module")
def checkpoint():
    return random_checkpoint(CONFIG, seed=3)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_parameters_are_those_of_the_specs_in_order(checkpoint, kind):
    packed = [(name, (t.shape, str(t.dtype))) for name, t in pack_parameters(checkpoint, kind, 9)]
    assert packed == list(parameter_specs(CONFIG, kind, 9).items())


@pytest.mark.parametrize("kind", LAYOUTS)
def test_fused_matrices_hold_their_parts_in_plain_row_order(checkpoint, kind):
    parameters = dict(pack_parameters(checkpoint, kind, 9))
    for matrix, parts in FUSED.items():
        rows = segments(CONFIG, matrix)
        k = matrix_shapes(CONFIG)[f"layers.1.{parts[0]}"][1]
        codes = unpack(parameters[f"layers.1.{matrix}.weight"], sum(rows), k, kind)
        pieces = np.split(codes, np.cumsum(rows)[:-1])
        for part, piece, scale in zip(
            parts, pieces, parameters[f"layers.1.{matrix}.scale"], strict=True
        ):
            wanted, wanted_scale = checkpoint.low_bit(f"layers.1.{part}")
            np.testing.assert_array_equal(piece, wanted)
            assert scale == np.float32(wanted_scale)


def test_random_tensors_are_seeded_by_name_and_differ(checkpoint):
    again, other = random_checkpoint(CONFIG, seed=3), random_checkpoint(CONFIG, seed=4)
    scales = []
    for name, shape in reversed(matrix_shapes(CONFIG).items()):
        codes, scale = again.low_bit(name)
        assert codes.shape == shape and set(np.unique(codes)) == {0, 1, 2}
        np.testing.assert_array_equal(codes, checkpoint.low_bit(name)[0])
        assert np.any(codes != other.low_bit(name)[0])
        scales.append(scale)
    assert len(set(scales)) == len(scales)
    for name, shape in dense_shapes(CONFIG).items():
        assert again.dense(name).shape == shape
        assert len(np.unique(again.dense(name))) > shape[-1] // 2
    for read in (checkpoint.low_bit, checkpoint.dense):
        with pytest.raises(KeyError):
            read("layers.2.norm")


def test_rope_table_is_cos_and_sin_of_the_angles():
    table = rope_table(CONFIG, 5000)
    assert table.shape == (5000, 6, 2) and table.dtype == np.float32
    inverse = 500000.0 ** (-np.arange(0, 12, 2) / 12)
    angles = 4999 * inverse
    np.testing.assert_allclose(table[4999, :, 0], np.cos(angles), atol=1e-3)
    np.testing.assert_allclose(table[4999, :, 1], np.sin(angles), atol=1e-3)
    assert table[0].tolist() == [[1.0, 0.0]] * 6


def test_shards_are_filled_and_recorded(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "SHARD_BYTES", 20_000)
    records = write_parameters(tmp_path, pack_parameters(checkpoint, "cuda", 9))
    assert [record["file"] for record in records] == sorted(p.name for p in tmp_path.iterdir())
    assert records[0]["file"] == "params-00001.safetensors" and len(records) > 1
    found = {}
    for record in records:
        data = (tmp_path / record["file"]).read_bytes()
        assert record["bytes"] == len(data)
        assert record["sha256"] == hashlib.sha256(data).hexdigest()
        tensors = load_file(tmp_path / record["file"])
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 20_000
        found |= tensors
    json.dumps(records)
    for name, tensor in pack_parameters(checkpoint, "cuda", 9):
        np.testing.assert_array_equal(found.pop(name), tensor)
    assert not found


def test_unwritable_directory_is_one_sentence(checkpoint, tmp_path):
    with pytest.raises(BitMTPError, match=r"params-00001\.safetensors cannot be written"):
        write_parameters(tmp_path / "none", pack_parameters(checkpoint, "cuda", 9))


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_real_shapes_pack_in_little_memory(kind, tmp_path):
    big = random_checkpoint(PRESETS["bitnet-2b"])
    records = write_parameters(tmp_path, pack_parameters(big, kind, 4096))
    assert sum(record["bytes"] for record in records) == pytest.approx(1.18e9, rel=0.01)
