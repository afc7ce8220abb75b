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
    LowBit,
    model_tensors,
    pack_parameters,
    parameter_specs,
    rope_table,
    segments,
    write_parameters,
)
from relax_models import bounded_head
from relax_models.config import PRESETS
from relax_models.formats import FORMATS, KINDS, unpack, unpack_scales

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


BONSAI = replace(
    PRESETS["bonsai-8b"],
    vocab_size=37,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=64,
)
CONFIGS = {
    "bitnet": CONFIG,
    "ternary-untied": BONSAI,
    "ternary-tied": replace(BONSAI, tie_word_embeddings=True),
    "binary-untied": replace(BONSAI, weight_format="binary-g128"),
}


@pytest.fixture(scope="module")
def checkpoint():
    return random_checkpoint(CONFIG, seed=3)


@pytest.fixture(scope="module", params=CONFIGS)
def any_checkpoint(request):
    return random_checkpoint(CONFIGS[request.param], seed=3)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_the_specs_in_order(any_checkpoint, kind):
    tensors = pack_parameters(any_checkpoint, kind, 9)
    packed = [(name, (t.shape, str(t.dtype))) for name, t in tensors]
    assert packed == list(parameter_specs(any_checkpoint.config, kind, 9).items())
    assert packed[0][0] == "embed.weight" and packed[-1][0] == "rope.table"


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_the_model(any_checkpoint, kind):
    from relax_models.layers import Storage
    from relax_models.models import MODELS

    config = any_checkpoint.config
    mod, names = MODELS[config.architecture](config, Storage(kind, 48, 9)).export()
    wanted = [v.ty for v in mod["decode"].params[-len(names) :]]
    shapes = {
        name: (tuple(int(size) for size in info.shape), str(info.dtype))
        for name, info in zip(names, wanted, strict=True)
        if not name.endswith(".kv.cache")
    }
    assert shapes == parameter_specs(config, kind, 9)


@pytest.mark.parametrize("kind", KINDS)
def test_fused_matrices_hold_their_parts_in_plain_row_order(any_checkpoint, kind):
    config = any_checkpoint.config
    form = FORMATS[config.weight_format]
    parameters = dict(pack_parameters(any_checkpoint, kind, 9))
    seen = 0
    for tensor in model_tensors(config):
        if not isinstance(tensor, LowBit):
            continue
        rows, k = sum(tensor.rows), tensor.k
        codes = unpack(parameters[f"{tensor.stem}.weight"], rows, k, kind, form.bits)
        scales = parameters[f"{tensor.stem}.scale"]
        pieces = np.split(codes, np.cumsum(tensor.rows)[:-1])
        if form.group:
            scales = unpack_scales(scales, rows, k, kind, form.bits)
            scales = np.split(scales, np.cumsum(tensor.rows)[:-1])
        for source, piece, scale in zip(tensor.sources, pieces, scales, strict=True):
            wanted, wanted_scale = any_checkpoint.low_bit(source)
            np.testing.assert_array_equal(piece, wanted)
            np.testing.assert_array_equal(scale, np.asarray(wanted_scale, scale.dtype))
            seen += 1
    assert seen == len(matrix_shapes(config))


def test_segments_are_the_rows_of_the_parts():
    assert {matrix: segments(BONSAI, matrix) for matrix in FUSED} == {
        "qkv": (384, 192, 192),
        "o": (128,),
        "gate_up": (256, 256),
        "down": (128,),
    }


def test_random_groups_have_scales_of_their_own(any_checkpoint):
    config = any_checkpoint.config
    form = FORMATS[config.weight_format]
    for name, (n, k) in matrix_shapes(config).items():
        codes, scales = any_checkpoint.low_bit(name)
        assert codes.shape == (n, k) and set(np.unique(codes)) == set(range(form.bits + 1))
        if form.group:
            assert scales.shape == (n, k // 128) and scales.dtype == np.float16
            assert len(np.unique(scales)) > min(scales.size, 300) // 2
    assert config.quantization == "random"


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


def test_a_large_table_has_codes_behind_it_on_cuda(checkpoint, monkeypatch):
    monkeypatch.setattr(bounded_head, "LEAST_ELEMENTS", 37 * 72)
    assert [*parameter_specs(CONFIG, "llvm", 9)][:2] == [
        "embed.weight",
        "layers.0.input_norm.weight",
    ]
    assert [*parameter_specs(CONFIG, "cuda", 9)][:3] == [
        "embed.weight",
        "embed.codes",
        "embed.bounds",
    ]
    packed = {name: tensor for name, tensor in pack_parameters(checkpoint, "cuda", 9)}
    shapes = {name: (tensor.shape, str(tensor.dtype)) for name, tensor in packed.items()}
    assert shapes == parameter_specs(CONFIG, "cuda", 9)
    codes, bounds = bounded_head.pack_codes(checkpoint.dense("embed"))
    np.testing.assert_array_equal(packed["embed.codes"], codes)
    np.testing.assert_array_equal(packed["embed.bounds"], bounds)


def test_unwritable_directory_is_one_sentence(checkpoint, tmp_path):
    with pytest.raises(BitMTPError, match=r"params-00001\.safetensors cannot be written"):
        write_parameters(tmp_path / "none", pack_parameters(checkpoint, "cuda", 9))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "size"),
    [
        ("bitnet-2b", "llvm", 1.18e9),
        # With the head's 8-bit table.
        ("bitnet-2b", "cuda", 1.5114e9),
        *[("bonsai-1.7b", kind, 0.4595e9) for kind in KINDS],
        *[("bonsai-4b", kind, 1.0712e9) for kind in KINDS],
    ],
)
def test_the_real_shapes_pack_in_little_memory(name, kind, size, tmp_path):
    big = random_checkpoint(PRESETS[name])
    records = write_parameters(tmp_path, pack_parameters(big, kind, 4096))
    assert sum(record["bytes"] for record in records) == pytest.approx(size, rel=0.01)
