from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from bitnet_checkpoint import (
    DEMO,
    ODD,
    WIDE,
    load_transformers,
    transformers_logits,
    write_checkpoint,
)
from tokenizers import Tokenizer

from bitmtp_tvm.checkpoint import open_checkpoint, random_checkpoint
from bitmtp_tvm.reference import (
    attention,
    embed,
    gated_norm_quantize,
    greedy,
    head,
    low_bit_accumulate,
    low_bit_linear,
    quantize,
    rms_norm,
    rope,
)
from bitmtp_tvm.reference.model import ReferenceModel
from bitmtp_tvm.weights import pack_parameters, rope_table
from relax_models.config import PRESETS
from relax_models.formats import KINDS, bf16_bits

TEXT = 'def fibonacci(n):\n    """The n-th number."""\n    if n < 2:\n        return n\n'


def demo_tokens():
    return np.array([0, *Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(TEXT).ids])


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    write_checkpoint(root / "odd", ODD, seed=1)
    write_checkpoint(root / "wide", WIDE, seed=2, shard_bytes=60_000)
    return {"odd": root / "odd", "wide": root / "wide", "demo": DEMO}


@pytest.fixture(scope="module")
def tokens():
    random = np.random.default_rng(5)
    return {
        "odd": random.integers(0, ODD["vocab_size"], 40),
        "wide": random.integers(0, WIDE["vocab_size"], 60),
        "demo": demo_tokens(),
    }


@pytest.fixture(scope="module", params=["odd", "wide", "demo"])
def pair(request, directories, tokens):
    """Our model, transformers' and a token sequence."""
    name = request.param
    checkpoint = open_checkpoint(directories[name])
    ours = ReferenceModel.from_checkpoint(checkpoint, len(tokens[name]))
    return ours, load_transformers(directories[name]), tokens[name].astype(np.int32)


@pytest.fixture(scope="module")
def trace(pair):
    """Input and output of every module in one transformers forward, by module name."""
    _, model, tokens = pair
    seen = {}

    def keep(name, module, arguments, output):
        if len(arguments) == 1 and isinstance(output, torch.Tensor):
            seen[name] = arguments[0][0].detach().numpy(), output[0].detach().numpy()

    hooks = [m.register_forward_hook(partial(keep, name)) for name, m in model.named_modules()]
    transformers_logits(model, tokens)
    for hook in hooks:
        hook.remove()
    return seen


def layers_of(pair):
    return range(pair[0].config.num_hidden_layers)


def test_logits_are_those_of_transformers(pair):
    """One int8 value rounded the other way in one row moves all later logits by about a percent."""
    ours, model, tokens = pair
    wanted = transformers_logits(model, tokens)
    rows = np.arange(len(tokens))
    got = ours.forward(tokens, rows, 0, None, ours.new_cache(len(tokens)))
    error = np.abs(got - wanted)
    assert np.sqrt(np.mean(error**2)) < 0.03 * wanted.std()
    best = np.sort(wanted, axis=-1)
    clear = best[:, -1] - best[:, -2] > 2 * error.max(axis=-1)
    assert clear.mean() > 0.5
    np.testing.assert_array_equal(greedy(got)[clear], wanted.argmax(axis=-1)[clear])


def test_every_linear_is_that_of_transformers(pair, trace):
    """On its very inputs: the int8 activations equal, but for ties, and the sums exact."""
    ours, model, _ = pair
    linears = [n for n in trace if n.endswith("_proj")]
    assert len(linears) == 7 * ours.config.num_hidden_layers
    for name in linears:
        module, (x, wanted) = model.get_submodule(name), trace[name]
        codes = (module.weight.detach().numpy() + 1).astype(np.uint8)
        q, scale, total = quantize(x)
        k = x.shape[1]
        same = alike(x, q[:, :k])
        assert not q[:, k:].any()
        exact = q[:, :k].astype(np.int64) @ codes.astype(np.int64).T
        np.testing.assert_array_equal(low_bit_accumulate(q, codes), exact)
        np.testing.assert_array_equal(total, q.sum(axis=-1))
        weight_scale = module.weight_scale.numpy()
        got = low_bit_linear(q, scale, total, codes, weight_scale, [len(codes)])
        tolerance = 1e-5 * np.abs(wanted).max()
        np.testing.assert_allclose(got[same], wanted[same], rtol=1e-4, atol=tolerance)


def alike(x, q):
    """Rows whose int8 values are those of Transformers, which are nearly all.

    It multiplies by 127 times a reciprocal: what that moves lies on a tie.
    """
    theirs = torch.tensor(x)
    theirs = (theirs * (127 / theirs.abs().max(dim=-1, keepdim=True).values)).round().numpy()
    moved = np.clip(theirs, -128, 127) != q
    wide = x.astype(np.float64)
    fraction = np.abs(wide * 127 / np.abs(wide).max(axis=-1, keepdims=True)) % 1
    assert np.abs(fraction[moved] - 0.5).max(initial=0) < 1e-4 and moved.sum() <= 1
    return ~moved.any(axis=-1)


def test_every_norm_is_that_of_transformers(pair, trace):
    ours, model, _ = pair
    norms = [n for n in trace if n.endswith("norm")]
    assert len(norms) == 4 * ours.config.num_hidden_layers + 1
    for name in norms:
        x, wanted = trace[name]
        weight = model.get_submodule(name).weight.detach().numpy()
        got = rms_norm(x, weight, ours.config.rms_norm_eps)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-7)


def test_every_attention_is_that_of_transformers(pair, trace):
    ours, _, tokens = pair
    config, rows = ours.config, np.arange(len(tokens))
    table = rope_table(config, len(tokens))
    for i in layers_of(pair):
        stem = f"model.layers.{i}.self_attn"
        q, k, v = (
            trace[f"{stem}.{n}_proj"][1].reshape(len(tokens), -1, config.head_dim) for n in "qkv"
        )
        q, k = rope(q, rows, table), rope(k, rows, table)
        visible = np.tri(len(tokens), dtype=bool)
        got = attention(q, k.transpose(1, 0, 2), v.transpose(1, 0, 2), 0, visible)
        wanted = trace[f"{stem}.attn_sub_norm"][0]
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-5 * np.abs(wanted).max())


def test_rope_table_is_that_of_transformers_far_out(pair):
    ours, model, _ = pair
    rows, half = 4096, ours.config.head_dim // 2
    like = torch.zeros(1, dtype=torch.float32)
    wanted = model.model.rotary_emb(like, torch.arange(rows)[None])
    table = rope_table(ours.config, rows)
    for part in range(2):
        np.testing.assert_allclose(table[..., part], wanted[part][0, :, :half], atol=1e-6)


def test_every_gate_is_that_of_transformers(pair, trace):
    ours, model, _ = pair
    for i in layers_of(pair):
        stem = f"model.layers.{i}.mlp"
        gate, up = (trace[f"{stem}.{n}_proj"][1] for n in ("gate", "up"))
        weight = model.get_submodule(f"{stem}.ffn_sub_norm").weight.detach().numpy()
        q, _, _ = gated_norm_quantize(gate, up, weight, ours.config.rms_norm_eps)
        wanted, _, _ = quantize(trace[f"{stem}.down_proj"][0])
        # The norm's float32 sums differ in order: a value on the edge may round the other way.
        assert np.abs(q.astype(int) - wanted).max() <= 1
        assert np.mean(q != wanted) < 1e-3


def test_embedding_and_head_are_those_of_transformers(pair, trace):
    ours, _, tokens = pair
    table = ours.tensors["embed.weight"]
    np.testing.assert_array_equal(embed(tokens, table), trace["model.embed_tokens"][1])
    x, wanted = trace["lm_head"]
    np.testing.assert_allclose(head(x, table), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["odd", "wide"])
def test_packed_parameters_give_the_same_logits(directories, tokens, name, kind):
    checkpoint, ids = open_checkpoint(directories[name]), tokens[name]
    plain = ReferenceModel.from_checkpoint(checkpoint, len(ids))
    parameters = dict(pack_parameters(checkpoint, kind, len(ids)))
    packed = ReferenceModel.from_packed(checkpoint.config, parameters, kind)
    assert plain.tensors.keys() == packed.tensors.keys()
    rows = np.arange(len(ids))
    one, two = (m.forward(ids, rows, 0, None, m.new_cache(len(ids))) for m in (plain, packed))
    np.testing.assert_array_equal(one, two)


@pytest.fixture(scope="module")
def odd(directories):
    return ReferenceModel.from_checkpoint(open_checkpoint(directories["odd"]), 64)


def close(got, wanted):
    """Equal up to a few int8 values that round the other way."""
    return np.sqrt(np.mean((got - wanted) ** 2)) < 0.03 * wanted.std()


def test_steps_of_any_width_continue_one_another(odd, tokens):
    ids = tokens["odd"]
    whole, split = odd.new_cache(len(ids)), odd.new_cache(len(ids))
    wanted = odd.forward(ids, np.arange(len(ids)), 0, None, whole)
    start, rows = 0, []
    for width in (7, 1, 1, 16, 15):
        positions = np.arange(start, start + width)
        rows.append(odd.forward(ids[positions], positions, start, None, split))
        start += width
    assert close(np.concatenate(rows), wanted)
    assert close(split.keys, whole.keys) and close(split.values, whole.values)


def test_a_row_sees_only_what_its_mask_shows(odd, tokens):
    """Two alternatives for one position, side by side: each as if the other were not there."""
    ids, n = tokens["odd"], 10
    cache = odd.new_cache(32)
    odd.forward(ids[:n], np.arange(n), 0, None, cache)
    pair, positions = np.array([3, 7]), np.array([n, n])
    both = odd.forward(pair, positions, n, np.eye(2, dtype=bool), cache)
    for row, token in zip(both, pair, strict=True):
        alone = odd.forward(np.array([token]), np.array([n]), n, None, cache)
        assert close(row, alone[0])


def test_half_cache_rounds_through_float16(odd, tokens):
    ids = tokens["odd"]
    full, half = odd.new_cache(len(ids)), odd.new_cache(len(ids), half=True)
    for cache in (full, half):
        odd.forward(ids, np.arange(len(ids)), 0, None, cache)
    wanted = full.keys[0].astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(half.keys[0], wanted)


def test_random_weights_keep_everything_of_order_one():
    config = replace(PRESETS["bitnet-2b"], vocab_size=500, hidden_size=256, intermediate_size=700)
    config = replace(config, num_attention_heads=8, num_key_value_heads=2, head_dim=32)
    model = ReferenceModel.from_checkpoint(random_checkpoint(config), 16)
    ids, cache = np.arange(16) * 31, model.new_cache(16)
    logits = model.forward(ids, np.arange(16), 0, None, cache)
    for values in (logits, cache.keys, cache.values):
        assert 0.3 < values.std() < 3
    assert len(set(greedy(logits))) > 8


def test_attention_of_one_visible_slot_is_its_value():
    random = np.random.default_rng(0)
    q, k, v = (random.normal(size=s).astype(np.float32) for s in ((2, 4, 8), (2, 5, 8), (2, 5, 8)))
    got = attention(q, k, v, 0, np.eye(2, dtype=bool)).reshape(2, 4, 8)
    for row in range(2):
        np.testing.assert_allclose(got[row], v[[0, 0, 1, 1], row], rtol=1e-6)


def test_quantize_worked_example():
    x = np.array([[1.0, -0.5, 0.25, 0.0], [0.0, 0.0, 0.0, 0.0]], np.float32)
    q, scale, total = quantize(x)
    assert q.shape == (2, 128) and q.dtype == np.int8
    assert q[0, :4].tolist() == [127, -64, 32, 0] and not q[0, 4:].any() and not q[1].any()
    assert total.tolist() == [95, 0] and total.dtype == np.int32
    np.testing.assert_array_equal(scale, np.float32([1, 1e-5]) / np.float32(127))


def test_quantize_rounds_half_to_even():
    x = np.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]], np.float32)
    assert quantize(x)[0][0, :6].tolist() == [127, 0, 2, 2, 0, -2]


def test_sums_are_exact_at_the_largest_sizes():
    q = np.full((1, 1 << 17), -128, np.int8)
    for k in (6912, 1 << 17):
        codes = np.full((2, k), 2, np.uint8)
        assert low_bit_accumulate(q[:, :k], codes).tolist() == [[-256 * k] * 2]


def test_each_segment_has_its_own_scale():
    q = np.zeros((1, 128), np.int8)
    q[0, 0] = 10
    one = np.ones((1,), np.float32)
    codes = np.full((6, 1), 2, np.uint8)
    got = low_bit_linear(q, one, q.sum(axis=-1), codes, np.float32([1, 2, 3]), [3, 2, 1])
    assert got.tolist() == [[10, 10, 10, 20, 20, 30]]


def test_rope_pairs_halves():
    x = np.array([[[1.0, 2.0, 3.0, 4.0]]], np.float32)
    table = np.array([[[0.0, 1.0], [1.0, 0.0]]], np.float32)
    assert rope(x, np.array([0]), table).tolist() == [[[-3.0, 2.0, 1.0, 4.0]]]


def test_greedy_takes_the_lowest_of_equals_and_refuses_what_is_no_number():
    logits = np.zeros((6, 4), np.float32)
    logits[1] = [1, 3, 3, 2]
    logits[2, 1] = np.nan
    logits[3, 2] = np.inf
    logits[4] = -np.inf
    logits[5] = [-np.inf, -5, -4, -np.inf]
    assert greedy(logits).tolist() == [0, 1, -1, 2, -1, 2]


def test_head_uses_the_embedding():
    table = bf16_bits(np.eye(3, dtype=np.float32))
    assert head(np.array([[1.0, 2.0, 3.0]], np.float32), table).tolist() == [[1.0, 2.0, 3.0]]
