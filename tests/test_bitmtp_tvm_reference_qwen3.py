from functools import partial

import numpy as np
import pytest
import torch
from qwen3_checkpoint import TIED, UNTIED, load_qwen3, logits_of, write_qwen3

from bitmtp_tvm.checkpoint import open_checkpoint, random_checkpoint
from bitmtp_tvm.reference import (
    dequantize,
    gated_quantize,
    greedy,
    group_linear,
    low_bit_embed,
    qk_norm,
    quantize_groups,
    rms_norm,
    silu,
)
from bitmtp_tvm.reference.model import ReferenceModel
from bitmtp_tvm.weights import pack_parameters
from relax_models.config import ModelConfig
from relax_models.formats import KINDS

# Sizes, bits of the weights, element type, bytes a shard.
FILES = {
    "ternary-tied": (TIED, 2, "BF16", None),
    "binary-untied": (UNTIED, 1, "F16", 300_000),
    "binary-tied": (TIED, 1, "F32", None),
    "ternary-untied": (UNTIED, 2, "F32", 200_000),
}
ROWS = 48


@pytest.fixture(scope="module", params=FILES)
def pair(request, tmp_path_factory):
    """A checkpoint, transformers' model of the same weights and a token sequence."""
    sizes, bits, dtype, shard = FILES[request.param]
    directory = tmp_path_factory.mktemp("checkpoints") / request.param
    write_qwen3(directory, sizes, 3, bits, dtype, shard)
    quant = "binary-g128" if bits == 1 else "ternary-g128"
    tokens = np.random.default_rng(4).integers(0, sizes["vocab_size"], ROWS).astype(np.int32)
    return open_checkpoint(directory, quant=quant), load_qwen3(directory), tokens


def forward(model, tokens):
    return model.forward(tokens, np.arange(len(tokens)), 0, None, model.new_cache(len(tokens)))


def error(got, wanted):
    return np.sqrt(np.mean((got - wanted) ** 2)) / wanted.std()


def test_logits_of_float_activations_are_those_of_transformers(pair):
    checkpoint, model, tokens = pair
    ours = ReferenceModel.from_checkpoint(checkpoint, ROWS, float_activations=True)
    wanted = logits_of(model, tokens)
    np.testing.assert_allclose(forward(ours, tokens), wanted, atol=1e-4 * np.abs(wanted).max())


def round_groups(x):
    """What int8 activations with one scale for each 128 columns stand for, written in torch."""
    groups = x.unflatten(-1, (-1, 128))
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    whole = (groups * (127 / largest)).round().clamp(-128, 127)
    return (whole * (largest / 127)).flatten(-2)


@pytest.fixture(scope="module")
def rounded(pair):
    """Logits of transformers' model with every linear's input rounded, and by the linear's name:
    its input, the rounded input, its output."""
    model, seen, hooks = pair[1], {}, []

    def before(_, arguments, name):
        seen[name] = [arguments[0][0].numpy(), round_groups(arguments[0])[0].numpy()]
        return round_groups(arguments[0])

    def after(_, arguments, output, name):
        seen[name].append(output[0].numpy())

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            hooks.append(module.register_forward_pre_hook(partial(before, name=name)))
            hooks.append(module.register_forward_hook(partial(after, name=name)))
    logits = logits_of(model, pair[2])
    for hook in hooks:
        hook.remove()
    return logits, seen


def test_logits_are_those_of_transformers_with_rounded_activations(pair, rounded):
    """One int8 value rounded the other way in one row moves all later logits by some percent; the
    two tests around this one are the sharp ones."""
    checkpoint, _, tokens = pair
    got = forward(ReferenceModel.from_checkpoint(checkpoint, ROWS), tokens)
    wanted, _ = rounded
    assert error(got, wanted) < 0.06
    best = np.sort(wanted, axis=-1)
    clear = best[:, -1] - best[:, -2] > 2 * np.abs(got - wanted).max(axis=-1)
    assert clear.mean() > 0.3
    np.testing.assert_array_equal(greedy(got)[clear], wanted.argmax(axis=-1)[clear])


def test_every_linear_is_that_of_transformers(pair, rounded):
    """On its very inputs: the int8 activations equal, so only the order of the sums is left."""
    checkpoint, model, _ = pair
    _, seen = rounded
    bits = 1 if checkpoint.config.weight_format == "binary-g128" else 2
    assert len(seen) == 7 * checkpoint.config.num_hidden_layers + 1
    for name, (x, whole, wanted) in seen.items():
        ours = name.replace("model.", "").replace("self_attn.", "").replace("mlp.", "")
        tied = checkpoint.config.tie_word_embeddings
        ours = {"lm_head": "embed" if tied else "head"}.get(ours, ours)
        codes, scales = checkpoint.low_bit(ours)
        weight = model.get_submodule(name).weight.detach().numpy()
        np.testing.assert_array_equal(dequantize(codes, scales, bits), weight)
        q, scale, total = quantize_groups(x)
        groups = q.reshape(*scale.shape, 128) * scale[..., None]
        np.testing.assert_array_equal(groups.reshape(x.shape), whole)
        got = group_linear(q, scale, total, codes, scales, bits)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


def test_the_embedding_is_that_of_transformers(pair):
    checkpoint, model, tokens = pair
    bits = 1 if checkpoint.config.weight_format == "binary-g128" else 2
    got = low_bit_embed(tokens, *checkpoint.low_bit("embed"), bits)
    with torch.no_grad():
        wanted = model.model.embed_tokens(torch.tensor(tokens)).numpy()
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_parameters_give_the_same_logits(pair, kind):
    checkpoint, _, tokens = pair
    plain = ReferenceModel.from_checkpoint(checkpoint, ROWS)
    parameters = dict(pack_parameters(checkpoint, kind, ROWS))
    packed = ReferenceModel.from_packed(checkpoint.config, parameters, kind)
    assert plain.tensors.keys() == packed.tensors.keys()
    for name, tensor in plain.tensors.items():
        np.testing.assert_array_equal(packed.tensors[name], tensor)
    np.testing.assert_array_equal(forward(plain, tokens), forward(packed, tokens))


def test_steps_of_any_width_continue_one_another(pair):
    checkpoint, _, tokens = pair
    model = ReferenceModel.from_checkpoint(checkpoint, ROWS)
    cache, start, rows = model.new_cache(ROWS), 0, []
    for width in (9, 1, 1, 17, 20):
        positions = np.arange(start, start + width)
        rows.append(model.forward(tokens[positions], positions, start, None, cache))
        start += width
    assert error(np.concatenate(rows), forward(model, tokens)) < 0.01


# Wide enough that the law of large numbers holds, as in the real models.
SHAPE = {
    "architecture": "qwen3",
    "vocab_size": 500,
    "hidden_size": 384,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
}


@pytest.mark.parametrize("weight_format", ["ternary-g128", "binary-g128"])
@pytest.mark.parametrize("tied", [True, False])
def test_random_weights_keep_everything_of_order_one(weight_format, tied):
    config = ModelConfig(**SHAPE, tie_word_embeddings=tied, weight_format=weight_format)
    model = ReferenceModel.from_checkpoint(random_checkpoint(config), 32)
    ids, cache = np.arange(32) * 15, model.new_cache(32)
    logits = model.forward(ids, np.arange(32), 0, None, cache)
    for values in (logits, cache.keys, cache.values):
        assert 0.3 < values.std() < 3
    assert len(set(greedy(logits))) > 8


def test_quantize_groups_worked_example():
    x = np.zeros((2, 200), np.float32)
    x[0, :3], x[0, 128:131] = [1, -0.5, 0.25], [4, 2, -4]
    q, scale, total = quantize_groups(x)
    assert q.shape == (2, 256) and scale.shape == total.shape == (2, 2)
    assert (q.dtype, scale.dtype, total.dtype) == (np.int8, np.float32, np.int32)
    assert q[0, :3].tolist() == [127, -64, 32] and q[0, 128:131].tolist() == [127, 64, -127]
    assert np.count_nonzero(q) == 6 and total.tolist() == [[95, 64], [0, 0]]
    units = np.float32([[1, 4], [1e-5, 1e-5]]) / np.float32(127)
    np.testing.assert_array_equal(scale, units)


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("k", [128, 384, 200])
def test_group_linear_is_its_sum(bits, k):
    """Against plain float64, one product at a time."""
    random = np.random.default_rng(k)
    x = random.normal(size=(3, k)).astype(np.float32)
    codes = random.integers(0, bits + 1, (5, k)).astype(np.uint8)
    scales = random.uniform(0.5, 2, (5, -(-k // 128))).astype(np.float16)
    q, scale, total = quantize_groups(x)
    weight = codes.astype(np.float64) - 1 if bits == 2 else 2 * codes.astype(np.float64) - 1
    wanted = np.zeros((3, 5))
    for w, n, column in np.ndindex(3, 5, k):
        unit = float(scale[w, column // 128]) * float(scales[n, column // 128])
        wanted[w, n] += unit * weight[n, column] * float(q[w, column])
    got = group_linear(q, scale, total, codes, scales, bits)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_group_sums_are_exact_at_their_largest():
    q = np.full((1, 128), -128, np.int8)
    one, total = np.ones((1, 1), np.float32), np.full((1, 1), -128 * 128, np.int32)
    scales = np.ones((2, 1), np.float16)
    codes = np.stack([np.full(128, 2, np.uint8), np.zeros(128, np.uint8)])
    assert group_linear(q, one, total, codes, scales, 2).tolist() == [[-16384, 16384]]
    assert group_linear(q, one, total, codes // 2, scales, 1).tolist() == [[-16384, 16384]]


def test_qk_norm_leaves_the_values():
    random = np.random.default_rng(0)
    qkv = random.normal(size=(2, (4 + 2 * 2) * 8)).astype(np.float32)
    q_norm, k_norm = (random.uniform(0.5, 2, 8).astype(np.float32) for _ in range(2))
    got = qk_norm(qkv, q_norm, k_norm, 4, 1e-6)
    for h, weight in [(0, q_norm), (3, q_norm), (4, k_norm), (5, k_norm)]:
        head = slice(h * 8, h * 8 + 8)
        np.testing.assert_array_equal(got[:, head], rms_norm(qkv[:, head], weight, 1e-6))
    np.testing.assert_array_equal(got[:, 48:], qkv[:, 48:])


def test_silu_is_finite_everywhere():
    x = np.float32([-1e30, -100, -1, 0, 1, 100, 1e30])
    wanted = [0, 0, -0.26894143, 0, 0.7310586, 100, 1e30]
    np.testing.assert_allclose(silu(x), wanted, rtol=1e-6, atol=1e-30)


def test_gated_quantize_is_silu_of_the_gate():
    random = np.random.default_rng(1)
    gate, up = (random.normal(size=(2, 256)).astype(np.float32) for _ in range(2))
    wanted = torch.nn.functional.silu(torch.tensor(gate)).numpy() * up
    q, scale, total = gated_quantize(gate, up)
    assert np.abs(q.reshape(2, 2, 128) * scale[..., None] - wanted.reshape(2, 2, 128)).max() < (
        0.51 * scale.max()
    )
    np.testing.assert_array_equal(total, q.reshape(2, 2, 128).sum(axis=-1))
