"""BitNet files that are not packed offline: the legacy class, master weights, silu."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
from bitnet_checkpoint import (
    DEMO,
    LEGACY,
    ODD,
    ONLINE,
    QUANTIZATION,
    WIDE,
    load_transformers,
    transformers_logits,
    write_checkpoint,
)
from checkpoint_edits import edit_json, edit_tensors, read_all, refused

from bitmtp_tvm.checkpoint import matrix_shapes, open_checkpoint
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.reference import low_bit_linear, quantize
from bitmtp_tvm.reference.model import ReferenceModel
from relax_models.config import MTPConfig

SINGLE = "model.safetensors"
Q0 = "model.layers.0.self_attn.q_proj.weight"
EMBED = "model.embed_tokens.weight"
# Sizes, seed, bytes a shard, quantization_config, activation.
FILES = {
    "legacy": (ODD, 5, None, LEGACY, "relu2"),
    "online": (WIDE, 6, 90_000, ONLINE, "relu2"),
    "plain": (WIDE, 6, 90_000, None, "relu2"),
    "silu": (ODD, 7, None, QUANTIZATION, "silu"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        name: (root / name, write_checkpoint(root / name, *arguments))
        for name, arguments in FILES.items()
    }


@pytest.fixture
def copy(written, tmp_path):
    """A function that copies a checkpoint for a test to damage."""

    def make(name):
        return shutil.copytree(written[name][0], tmp_path / name)

    return make


def stored_name(name):
    _, layer, part = name.split(".")
    place = "mlp" if part in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    return f"model.layers.{layer}.{place}.{part}.weight"


def test_the_legacy_scale_divides(written):
    directory, dequantised = written["legacy"]
    checkpoint = open_checkpoint(directory)
    assert checkpoint.config.quantization == "packed"
    scales = set()
    for name in matrix_shapes(checkpoint.config):
        codes, scale = checkpoint.low_bit(name)
        weights = (codes.astype(np.float32) - 1) * np.float32(scale)
        np.testing.assert_array_equal(weights, dequantised[stored_name(name)])
        scales.add(scale)
    assert len(scales) == len(matrix_shapes(checkpoint.config)) and min(scales) > 1


def test_master_weights_are_quantised_matrix_by_matrix(written):
    """round(w / mean|w|), clipped; a value whose quotient is half a unit may go either way."""
    directory, stored = written["online"]
    checkpoint = open_checkpoint(directory)
    assert checkpoint.config.quantization == "master weights, absmean per matrix"
    scales = set()
    for name in matrix_shapes(checkpoint.config):
        codes, scale = checkpoint.low_bit(name)
        weights = stored[stored_name(name)].astype(np.float64)
        mean = np.abs(weights).mean()
        assert scale == pytest.approx(mean, rel=1e-6)
        clear = np.abs(np.abs(weights / mean) - 0.5) > 1e-6
        wanted = np.clip(np.rint(weights / mean), -1, 1) + 1
        np.testing.assert_array_equal(codes[clear], wanted[clear])
        assert clear.mean() > 0.99 and set(np.unique(codes)) == {0, 1, 2}
        scales.add(scale)
    assert len(scales) == len(matrix_shapes(checkpoint.config))


def test_master_weights_need_no_quantisation_config(written):
    one, two = (open_checkpoint(written[name][0]) for name in ("online", "plain"))
    assert one.config == two.config
    for name in matrix_shapes(one.config):
        for a, b in zip(one.low_bit(name), two.low_bit(name), strict=True):
            np.testing.assert_array_equal(a, b)


def test_master_weights_of_zero(copy):
    def change(tensors):
        tensors[Q0]["data"] = bytes(len(tensors[Q0]["data"]))

    directory = copy("online")
    place = json.loads((directory / f"{SINGLE}.index.json").read_text())["weight_map"][Q0]
    edit_tensors(directory / place, change)
    codes, scale = open_checkpoint(directory).low_bit("layers.0.q_proj")
    assert (codes == 1).all() and scale == np.float32(1e-5)


@pytest.fixture(scope="module", params=["legacy", "online", "silu"])
def pair(request, written):
    """A checkpoint, transformers' model of it and a token sequence."""
    directory, (sizes, *_) = written[request.param][0], FILES[request.param]
    tokens = np.random.default_rng(8).integers(0, sizes["vocab_size"], 40).astype(np.int32)
    return open_checkpoint(directory), load_transformers(directory), tokens


def test_logits_are_those_of_transformers(pair):
    """One int8 value rounded the other way in one row moves all later logits by about a percent."""
    checkpoint, model, tokens = pair
    ours = ReferenceModel.from_checkpoint(checkpoint, len(tokens))
    wanted = transformers_logits(model, tokens)
    rows = np.arange(len(tokens))
    got = ours.forward(tokens, rows, 0, None, ours.new_cache(len(tokens)))
    assert np.sqrt(np.mean((got - wanted) ** 2)) < 0.03 * wanted.std()


def test_every_linear_is_that_of_transformers(pair):
    """On its very inputs."""
    checkpoint, model, tokens = pair
    seen = {}

    def keep(module, arguments, output, name):
        seen[name] = arguments[0][0].detach().numpy(), output[0].detach().numpy()

    hooks = [
        module.register_forward_hook(partial(keep, name=name))
        for name, module in model.named_modules()
        if name.endswith("_proj")
    ]
    transformers_logits(model, tokens)
    for hook in hooks:
        hook.remove()
    for name, (x, wanted) in seen.items():
        _, _, layer, _, part = name.split(".")
        codes, scale = checkpoint.low_bit(f"layers.{layer}.{part}")
        got = low_bit_linear(*quantize(x), codes, np.float32([scale]), [len(codes)])
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
    assert len(seen) == len(matrix_shapes(checkpoint.config))


def test_multi_token_prediction_from_the_options(written):
    checkpoint = open_checkpoint(written["legacy"][0], mask_token_id=60, block_size=4)
    assert checkpoint.config.mtp == MTPConfig(4, 60)
    with pytest.raises(UsageError, match="--block-size"):
        open_checkpoint(written["legacy"][0], mask_token_id=60)
    with pytest.raises(BitMTPError, match="--mask-token-id says 5"):
        open_checkpoint(DEMO, mask_token_id=5)


# ---- what is refused


def test_the_rule_of_a_bitnet_is_its_own(written):
    for name in ("legacy", "online", "plain"):
        refused(written[name][0], "--quant ternary-g128", "BitNet", quant="ternary-g128")


def test_packed_weights_that_nothing_explains(copy):
    directory = copy("legacy")
    edit_json(directory / "config.json", lambda config: config.update(quantization_config=None))
    refused(directory, SINGLE, Q0, "is packed", "quantization_config is None")
    edit_json(directory / "config.json", lambda config: config.update(quantization_config=ONLINE))
    refused(directory, SINGLE, Q0, "is packed", "quantization_mode is 'online'")


def test_master_weights_that_are_called_packed(copy):
    directory = copy("online")
    edit_json(
        directory / "config.json", lambda config: config.update(quantization_config=QUANTIZATION)
    )
    refused(directory, "weight_scale")


@pytest.mark.parametrize("stored", [3, "bitnet", [], {"quant_method": "bitnet"}])
def test_quantisation_that_says_nothing(copy, stored):
    directory = copy("legacy")
    edit_json(directory / "config.json", lambda config: config.update(quantization_config=stored))
    refused(directory, "config.json", "quantization_config")


def test_old_legacy_files_name_no_mode(copy):
    directory = copy("legacy")
    edit_json(
        directory / "config.json",
        lambda config: config["quantization_config"].pop("quantization_mode"),
    )
    read_all(directory)


@pytest.mark.parametrize("bits", [0x0001, 0x7F7F])
def test_a_legacy_scale_that_cannot_divide(copy, bits):
    """One over the smallest bfloat16 is infinite in float32."""

    def change(tensors):
        tensors[f"{Q0}_scale"]["data"] = bits.to_bytes(2, "little")

    directory = copy("legacy")
    edit_tensors(directory / SINGLE, change)
    if bits == 1:
        refused(directory, f"{Q0}_scale", "no scale")
    else:
        read_all(directory)


def test_a_tied_head_that_is_stored_once_more(copy):
    def add(tensors):
        tensors["lm_head.weight"] = dict(tensors[EMBED])

    def damage(tensors):
        tensors["lm_head.weight"]["data"] = bytes(len(tensors[EMBED]["data"]))

    directory = copy("legacy")
    edit_tensors(directory / SINGLE, add)
    read_all(directory)
    edit_tensors(directory / SINGLE, damage)
    refused(directory, "lm_head.weight", EMBED, "tie_word_embeddings")
