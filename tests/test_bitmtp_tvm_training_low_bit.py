"""The trained model is the compiled one: codes, scales and logits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from bitnet_checkpoint import LEGACY, QUANTIZATION, write_checkpoint
from tiny_training import (
    BITNET,
    BITNET_SILU,
    QWEN3,
    QWEN3_UNTIED,
    causal,
    model_of,
    write_tokenizer,
)

from bitmtp_tvm.checkpoint import matrix_shapes, open_checkpoint
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.reference import ops as reference
from bitmtp_tvm.reference.model import ReferenceModel
from bitmtp_tvm.training import low_bit
from bitmtp_tvm.training.checkpoint import latent_of, load, save
from bitmtp_tvm.training.model import TrainableDecoder
from relax_models.quantizers import QUANTIZERS, get_quantizer

CASES = {
    "bitnet": (BITNET, None),
    "bitnet silu": (BITNET_SILU, None),
    "ternary": (QWEN3, "ternary-g128"),
    "ternary absmean": (QWEN3, "ternary-g128-absmean"),
    "binary, untied, yarn": (QWEN3_UNTIED, "binary-g128"),
}
ROWS = np.random.default_rng(1)


def tied_rows(shape):
    """Rows with values halfway between codes, a row of zeros, one that is tiny, one with an end."""
    x = ROWS.standard_normal(shape).astype(np.float32)
    x[0] = np.round(x[0] * 8) / 16
    x[0, 0] = 127 / 16
    x[1] = 0
    x[2] *= 1e-9
    x[3, 5] = -77
    return x


@pytest.mark.parametrize("size", [40, 384])
def test_activations_get_the_codes_of_the_reference(size):
    x = tied_rows((9, size))
    q, scale, _ = reference.quantize(x)
    codes, unit = low_bit.quantise_rows(torch.from_numpy(x))
    assert np.array_equal(codes.numpy(), q[:, :size])
    assert np.array_equal(unit[:, 0].numpy(), scale)


def test_activations_by_groups_get_the_codes_of_the_reference():
    x = tied_rows((9, 384))
    q, scale, _ = reference.quantize_groups(x)
    codes, unit = low_bit.quantise_rows(torch.from_numpy(x), 128)
    assert np.array_equal(codes.numpy(), q)
    assert np.array_equal(unit.numpy(), scale)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_groups_get_the_codes_and_scales_of_the_packer(name):
    w = torch.from_numpy(tied_rows((300, 384)))
    w[4, :128] = 0.5 * w[4, :128].sign()
    w[5, :128] *= 1e-6
    w[6] = w[6].sign() * (torch.arange(384) % 3 != 0)
    w = w.bfloat16().float()
    quantizer = get_quantizer(name)
    codes, scales = quantizer.quantize(w.numpy())
    signs, exact = low_bit.group_weights(w, quantizer)
    stored = (signs + 1) if name.startswith("ternary") else (signs + 1) / 2
    assert np.array_equal(stored.numpy(), codes)
    assert np.array_equal(exact.numpy(), scales.astype(np.float32))


def test_a_scale_is_rounded_to_float16_once():
    # Half a unit and a little: by way of float32 the little is lost, and the tie goes to even.
    exact = torch.tensor([1 + 2**-11 + 2**-40, 1 + 2**-11, 3 * 2**-25, 0.0], dtype=torch.float64)
    wanted = exact.numpy().astype(np.float16).astype(np.float32)
    assert wanted[0] != wanted[1]
    assert np.array_equal(low_bit._float16(exact).numpy(), wanted)


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    """A model, the checkpoint saved of it, as the compiler opens it, and its rule."""
    config, quant = CASES[request.param]
    model = model_of(config, quant)
    save(model, tmp_path, text_files=write_tokenizer(tmp_path / "text" / "tokenizer.json"))
    return model, open_checkpoint(tmp_path, quant=quant), tmp_path


def test_a_saved_checkpoint_gives_the_compiler_the_codes_that_were_trained(case):
    model, checkpoint, _ = case
    assert replace(checkpoint.config, quantization="") == model.config
    named = dict(model.named_parameters())
    for name in matrix_shapes(model.config):
        codes, scale = checkpoint.low_bit(name)
        latent = named[f"{low_bit_name(name)}.weight"].detach()
        if model.quantizer is None:
            signs, unit = low_bit.ternary_matrix(latent)
            assert float(unit) == scale
        else:
            signs, unit = low_bit.group_weights(latent, model.quantizer)
            assert np.array_equal(unit.numpy(), scale.astype(np.float32))
        binary = model.config.weight_format == "binary-g128"
        assert np.array_equal((signs.numpy() + 1) / (2 if binary else 1), codes)


def low_bit_name(name):
    from bitmtp_tvm.checkpoint.hf import hf_name

    return hf_name(name)


def test_its_logits_are_those_of_the_reference(case):
    model, checkpoint, _ = case
    tokens = ROWS.integers(0, model.config.vocab_size, (16, 4)).astype(np.int32)
    twin = ReferenceModel.from_checkpoint(checkpoint, 64)
    theirs = np.stack(
        [twin.forward(row, np.arange(4), 0, None, twin.new_cache(4)) for row in tokens]
    )
    with torch.no_grad():
        rows = torch.from_numpy(tokens).long()
        hidden = model(rows, torch.arange(4).expand(16, 4), causal(4))
        ours = model.logits(hidden).numpy()
    apart = np.abs(ours - theirs).max(-1) / theirs.std()
    # Where a float sum differs in its last bit, a code may round the other way, in so small a model
    # with an effect on all that follow in the sequence. All other rows are the same: most of them.
    assert (apart < 1e-5).mean() > 0.5
    assert apart.max() < 0.4


def test_a_checkpoint_that_was_saved_loads_again(case):
    model, _, path = case
    again = load(path)
    for (name, one), (other, two) in zip(
        model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(one.bfloat16().float(), two)
    assert (again.quantizer and again.quantizer.name) == (model.quantizer and model.quantizer.name)


def test_shards_hold_what_one_file_holds(case, tmp_path):
    model, _, path = case
    save(model, tmp_path / "shards", shard_bytes=20_000)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    # The rule stands in config.json; the tokenizer is not needed.
    for one, two in zip(
        load(path).parameters(), load(tmp_path / "shards").parameters(), strict=True
    ):
        assert torch.equal(one, two)


def test_gradients_take_the_rounding_for_the_identity():
    torch.manual_seed(0)
    x = torch.randn(7, 40, requires_grad=True)
    latents = [torch.randn(n, 40, requires_grad=True) for n in (5, 9)]
    (low_bit.matrix_linear(x, latents, torch.float32) * torch.arange(14)).sum().backward()
    codes, scale = low_bit.quantise_rows(x.detach())
    parts = [low_bit.ternary_matrix(latent.detach()) for latent in latents]
    table = torch.cat([signs * unit for signs, unit in parts])
    dy = torch.arange(14.0).expand(7, 14)
    assert torch.allclose(x.grad, dy @ table, rtol=1e-5, atol=1e-4)
    into = dy.T @ (codes * scale)
    assert torch.allclose(
        torch.cat([latent.grad for latent in latents]), into, rtol=1e-5, atol=1e-4
    )


def test_bfloat16_products_are_the_integer_sums():
    """What the products of a GPU rely on: int8 and ternary values are exact in bfloat16."""
    q = torch.randint(-128, 128, (64, 512)).float()
    assert torch.equal(q.bfloat16().float(), q)
    with pytest.raises(ValueError, match="too long for exact sums"):
        low_bit.matrix_linear(torch.zeros(1, 1 << 17), [torch.zeros(1, 1 << 17)], torch.float32)


@pytest.mark.parametrize("quantization", [QUANTIZATION, LEGACY])
def test_packed_weights_become_latent_ones_with_the_same_codes_and_scales(tmp_path, quantization):
    sizes = {
        "vocab_size": 61,
        "hidden_size": 72,
        "intermediate_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 64,
    }
    write_checkpoint(tmp_path, sizes, quantization=quantization)
    model, checkpoint = load(tmp_path), open_checkpoint(tmp_path)
    named = dict(model.named_parameters())
    for name in matrix_shapes(model.config):
        codes, scale = checkpoint.low_bit(name)
        signs, unit = low_bit.ternary_matrix(named[f"{low_bit_name(name)}.weight"].detach())
        assert np.array_equal(signs.numpy() + 1, codes)
        assert float(unit) == pytest.approx(scale, rel=2e-7)


def test_a_matrix_of_zeros_has_no_latent_weights():
    with pytest.raises(BitMTPError, match="all zeros"):
        latent_of(np.ones((4, 8), np.uint8), 0.5)


def test_a_packed_checkpoint_is_the_latent_one(tmp_path):
    model = model_of(BITNET)
    save(model, tmp_path / "latent")
    save(model, tmp_path / "packed", packed=True)
    one, two = open_checkpoint(tmp_path / "latent"), open_checkpoint(tmp_path / "packed")
    assert one.config.mtp == two.config.mtp == BITNET.mtp
    assert (one.config.quantization, two.config.quantization) != ("", "packed")
    for name in matrix_shapes(model.config):
        (codes, scale), (others, other) = one.low_bit(name), two.low_bit(name)
        assert np.array_equal(codes, others)
        assert scale == other


def test_only_a_bitnet_can_be_packed(tmp_path):
    with pytest.raises(UsageError, match="only a BitNet"):
        save(model_of(QWEN3, "ternary-g128"), tmp_path, packed=True)


def test_a_rule_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="there is no rule"):
        TrainableDecoder(QWEN3, "nonsense")
