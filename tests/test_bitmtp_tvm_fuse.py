"""Which kernels become one, which stay, and that a fused one means what its parts mean."""

from collections import Counter
from dataclasses import replace
from functools import cache

import cpu_kernels
import numpy as np
import pytest
from test_bitmtp_tvm_specialize import TINY
from tvm import relax, tirx

from bitmtp_tvm import fuse as fuse_pass
from bitmtp_tvm import pipeline, reference
from bitmtp_tvm.fuse import fuse
from bitmtp_tvm.specialize import Bucket, bind_dims, specialize
from bitmtp_tvm.targets import get_target, tvm_target
from relax_models import attention_ops, fused_attention_ops, fused_ops, ops
from relax_models.attention_ops import CHAINS
from relax_models.bitnet import BitNet
from relax_models.bonsai import Bonsai
from relax_models.formats import pack, pack_scales, padded_k
from relax_models.layers import Storage
from schedules.workload import read

EPS = 1e-5
H200 = tvm_target(get_target("h200"))
ORIN = tvm_target(get_target("orin"))
BITNET = replace(TINY, intermediate_size=32, head_dim=64)
QWEN3 = replace(
    TINY,
    architecture="qwen3",
    vocab_size=600,
    hidden_size=128,
    intermediate_size=128,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    hidden_act="silu",
    weight_format="ternary-g128",
)
MODELS = {
    "bitnet": (BitNet, BITNET),
    "qwen3": (Bonsai, QWEN3),
    "long heads": (Bonsai, replace(QWEN3, head_dim=128)),
    "ragged": (BitNet, TINY),
}


@cache
def exported(name):
    model, config = MODELS[name]
    return model(config, Storage("cuda", 48, 32, shared_attention=True)).export()[0]


def step(name, width):
    """A step of two layers, of so many rows, as it is specialised."""
    return specialize(exported(name), [Bucket("decode", width)])


def ops_of(mod):
    """How often a module's one function calls each operation of a layer."""
    ((_, func),) = [(v, f) for v, f in mod.functions_items() if isinstance(f, relax.Function)]
    found = Counter()

    def visit(node):
        if isinstance(node, relax.Call) and getattr(node.op, "name", "").startswith("relax.call"):
            found[read(mod[node.args[0]]).op] += 1

    relax.analysis.post_order_visit(func, visit)
    for once in ("embed", "low_bit_embed", "final_norm", "head", "greedy"):
        del found[once]
    return found


def of_layers(**ops):
    """A layer's operations and the second half of its attention, twice."""
    layer = Counter(attention_join=1, **ops)
    return layer + layer


def test_a_bitnet_layer_of_one_row_has_six_kernels_of_eleven():
    mod = step("bitnet", 1)
    assert ops_of(mod).total() == 2 * 11
    assert ops_of(fuse(mod, H200)) == of_layers(norm_low_bit_linear=4, rope_attention_parts=1)


def test_a_qwen3_layer_of_one_row_has_seven_kernels_of_twelve():
    mod = step("qwen3", 1)
    # And what quantises the input of the head, and the head.
    assert ops_of(mod).total() == 2 * 12 + 2
    linears = {"norm_low_bit_linear": 2, "quantize_low_bit_linear": 2}
    want = of_layers(norm_rope_kv_write=1, attention_parts=1, **linears)
    assert ops_of(fuse(mod, H200)) == want + Counter(quantize_low_bit_linear=1)


@pytest.mark.parametrize("width", [2, 3, 8])
def test_wider_steps_keep_their_linears(width):
    """Two rows are turned by their attention, where their heads have no norm, which goes into the
    rotation at any width."""
    before, after = ops_of(step("bitnet", width)), ops_of(fuse(step("bitnet", width), H200))
    turned = Counter(rope_kv_write=2, attention_parts=2) if width == 2 else Counter()
    assert before - after == turned
    assert after - before == Counter(rope_attention_parts=2 if turned else 0)
    before, after = ops_of(step("qwen3", width)), ops_of(fuse(step("qwen3", width), H200))
    assert before - after == Counter(qk_norm=2, rope_kv_write=2)
    assert after - before == Counter(norm_rope_kv_write=2)


def test_the_cache_that_is_written_is_the_one_that_was_given():
    mod = fuse(step("bitnet", 2), H200)
    found = []

    def visit(node):
        if getattr(getattr(node, "op", None), "name", "") == "relax.call_tir_inplace":
            found.append(node)

    relax.analysis.post_order_visit(mod["decode_w2"], visit)
    for layer, call in enumerate(found):
        (at,) = [int(i) for i in call.attrs.inplace_indices if i >= 0]
        assert list(call.attrs.inplace_indices) == [-1, -1, -1, at]
        assert call.args[1].fields[at].name == f"layers.{layer}.kv.cache"
        assert mod[call.args[0]].params[at].name == "cache"
    assert len(found) == 2


def test_heads_that_tensor_cores_do_not_serve_are_turned_before_attention():
    found = ops_of(fuse(step("ragged", 1), H200))
    assert found["rope_kv_write"] == found["attention_parts"] == 2


class CacheReadTwice(fuse_pass.PyExprMutator):
    """Makes the second layer attend to the first one's cache."""

    def visit_call_(self, call):
        rebuilt = super().visit_call_(call)
        if not getattr(rebuilt.args[0] if rebuilt.args else None, "name_hint", "").startswith(
            "attention_parts"
        ):
            return rebuilt
        q, written, *rest = rebuilt.args[1].fields
        self.first = getattr(self, "first", written)
        fields = relax.Tuple([q, self.first, *rest])
        return relax.Call(call.op, [call.args[0], fields], call.attrs, call.ty_args)


def test_a_cache_that_two_read_is_written_before():
    mod = step("bitnet", 1)
    visitor = relax.expr_functor.mutator(CacheReadTwice)(mod)
    mod.update_func(mod.get_global_var("decode_w1"), visitor.visit_expr(mod["decode_w1"]))
    found = ops_of(fuse(mod, H200))
    assert found["attention_parts"] == 2 and found["rope_attention_parts"] == 0


@pytest.mark.parametrize("target", [H200, ORIN])
def test_attention_is_quantised_as_it_is_joined_where_heads_are_whole_groups(target):
    before, after = ops_of(step("long heads", 2)), ops_of(fuse(step("long heads", 2), target))
    gone, made = before - after, after - before
    assert gone["attention_join"] == gone["quantize"] == made["attention_join_quantize"] == 2
    # The linear of one row does it for itself, and that of two for a head of 32 in a kernel apart.
    for name, width in (("long heads", 1), ("qwen3", 2)):
        assert "attention_join_quantize" not in ops_of(fuse(step(name, width), target))


@pytest.mark.parametrize(("most", "fused"), [(2, 0), (4, 8)])
def test_the_widest_fused_step_is_one_constant(monkeypatch, most, fused):
    monkeypatch.setattr(fuse_pass, "FUSED_WIDTH", most)
    for target in (H200, ORIN):
        assert ops_of(fuse(step("bitnet", 4), target))["norm_low_bit_linear"] == fused


def test_a_gate_that_ends_within_a_tile_keeps_its_activation():
    """The linear's tiles of 16 rows would hold rows of the gate and of up."""
    found = ops_of(fuse(step("ragged", 1), H200))
    assert found["gated_norm_quantize"] == 2
    assert found["norm_low_bit_linear"] == 2 * 3 and found["low_bit_linear"] == 2


@pytest.mark.parametrize(("most", "fused"), [(600, 5), (599, 4)])
def test_the_head_of_a_large_vocabulary_quantises_its_input_once(monkeypatch, most, fused):
    monkeypatch.setattr(fuse_pass, "MOST_ROWS", most)
    assert ops_of(fuse(step("qwen3", 1), H200))["quantize_low_bit_linear"] == fused


class TwiceRead(fuse_pass.PyExprMutator):
    """Makes the second layer's qkv read what the first one's does."""

    def visit_call_(self, call):
        rebuilt = super().visit_call_(call)
        if not getattr(call.op, "name", "").startswith("relax.call_tir"):
            return rebuilt
        arguments = list(rebuilt.args[1].fields)
        if not any(getattr(a, "name", "").endswith(".qkv.weight") for a in arguments):
            return rebuilt
        self.first = getattr(self, "first", arguments[:3])
        fields = relax.Tuple([*self.first, *arguments[3:]])
        return relax.Call(call.op, [call.args[0], fields], call.attrs, call.ty_args)


def test_what_two_linears_read_is_quantised_once():
    mod = step("bitnet", 1)
    visitor = relax.expr_functor.mutator(TwiceRead)(mod)
    mod.update_func(mod.get_global_var("decode_w1"), visitor.visit_expr(mod["decode_w1"]))
    found = ops_of(fuse(mod, H200))
    assert found["norm_quantize"] == 1 and found["low_bit_linear"] == 2
    assert found["norm_low_bit_linear"] == 6


def test_other_targets_keep_their_kernels():
    mod = step("bitnet", 1)
    assert fuse(mod, tvm_target(get_target("cpu"))) is mod


@pytest.mark.parametrize("name", ["bitnet", "qwen3"])
def test_equal_fused_kernels_are_shared_and_the_pipeline_lowers_them(name):
    wanted = [Bucket(entry, 1) for entry in ("step", "decode", "prefill")]
    lowered = pipeline.lower(exported(name), wanted, H200)
    fused = [k for k in lowered.kernels if k.op.endswith("_low_bit_linear")]
    # Those of o and down are equal in the second, and its head is one of them.
    assert len({k.name for k in fused}) == len(fused) == 4
    for kernel in fused:
        assert kernel.width == 1 and kernel.name.endswith("_w1")
        assert kernel.format == MODELS[name][1].weight_format
    kept = {v.name_hint for v, f in lowered.mod.functions.items() if isinstance(f, tirx.PrimFunc)}
    assert {k.name for k in lowered.kernels} <= kept


def random_linear(rng, form, segments, size):
    rows = sum(segments)
    codes = rng.integers(0, 3, (rows, size)).astype(np.uint8)
    if form == "bitnet-ternary":
        scales = rng.uniform(0.5, 2, len(segments)).astype(np.float32)
        return codes, scales, [pack(codes, "cuda"), scales]
    scales = rng.uniform(0.5, 2, (rows, padded_k(size) // 128)).astype(np.float16)
    return codes, scales, [pack(codes, "cuda", 2), pack_scales(scales, "cuda", 2)]


@pytest.mark.parametrize("activation", ["", "silu", "relu2"])
@pytest.mark.parametrize("form", ["bitnet-ternary", "ternary-g128"])
def test_a_fused_linear_means_a_norm_a_quantisation_and_a_linear(rng, form, activation):
    segments, size, width = (16, 16), 200, 3
    codes, scales, weights = random_linear(rng, form, segments, size)
    x = rng.normal(size=(width, size)).astype(np.float32)
    norm = rng.uniform(0.5, 2, size).astype(np.float32)
    func = fused_ops.norm_low_bit_linear(segments, size, "cuda", form, False, EPS, activation)
    columns = 16 if activation else 32
    got = cpu_kernels.run(
        bind_dims(func, {"width": width}),
        [x, norm, *weights, np.zeros((width, columns), np.float32)],
    )[-1]
    normed = reference.rms_norm(x, norm, EPS)
    if form == "bitnet-ternary":
        want = reference.low_bit_linear(*reference.quantize(normed), codes, scales, segments)
    else:
        want = reference.group_linear(*reference.quantize_groups(normed), codes, scales, 2)
    if activation:
        want = reference.gated(want[:, :16], want[:, 16:], activation)
    # A code may round the other way.
    np.testing.assert_allclose(got, want, rtol=0.02, atol=0.02 * np.abs(want).max())


def test_a_fused_rotation_means_a_norm_and_a_rotation(rng):
    heads, kv_heads, head_dim, width = 4, 2, 8, 3
    qkv = rng.normal(size=(width, (heads + 2 * kv_heads) * head_dim)).astype(np.float32)
    norms = list(rng.uniform(0.5, 2, (2, head_dim)).astype(np.float32))
    position = rng.integers(0, 20, width).astype(np.int32)
    table = rng.normal(size=(20, head_dim // 2, 2)).astype(np.float32)
    cache = rng.normal(size=(2, kv_heads, 12, head_dim)).astype(np.float16)
    func = fused_ops.norm_rope_kv_write(heads, kv_heads, head_dim, 20, 12, EPS)
    rest = [position, np.array([5], np.int32), table, cache]
    *_, written, q = cpu_kernels.run(
        bind_dims(func, {"width": width}),
        [qkv, *norms, *rest, np.zeros((width, heads, head_dim), np.float32)],
    )
    rows = reference.qk_norm(qkv, *norms, heads, EPS).reshape(width, -1, head_dim)
    np.testing.assert_allclose(q, reference.rope(rows[:, :heads], position, table), rtol=1e-4)
    keys = reference.rope(rows[:, heads : heads + kv_heads], position, table)
    np.testing.assert_allclose(
        written[0, :, 5 : 5 + width], keys.transpose(1, 0, 2), rtol=2e-3, atol=2e-3
    )
    values = rows[:, heads + kv_heads :].transpose(1, 0, 2)
    np.testing.assert_allclose(written[1, :, 5 : 5 + width], values, rtol=2e-3, atol=2e-3)
    assert np.array_equal(written[:, :, :5], cache[:, :, :5])


def test_a_quantised_join_means_a_join_and_a_quantisation(rng):
    heads, head_dim, width, boundary = 2, 128, 3, 130
    parts = [rng.normal(size=(width, heads, CHAINS, *d)) for d in ((), (), (head_dim,))]
    parts = [part.astype(np.float32) for part in (parts[0], np.exp(parts[1]), parts[2])]
    inputs, at = [*parts, np.array([boundary], np.int32)], {"width": width}
    func = bind_dims(attention_ops.attention_join(heads, head_dim), at)
    size = heads * head_dim
    *_, whole = cpu_kernels.run(func, [*inputs, np.zeros((width, size), np.float32)])
    func = bind_dims(fused_ops.attention_join_quantize(heads, head_dim, 128), at)
    results = [np.zeros((width, size), np.int8), np.zeros((width, heads), np.float32)]
    *_, q, scale, total = cpu_kernels.run(
        func, [*inputs, *results, np.zeros((width, heads), np.int32)]
    )
    want, scales, totals = reference.quantize_groups(whole)
    assert np.array_equal(q, want) and np.array_equal(total, totals)
    np.testing.assert_allclose(scale, scales, rtol=1e-6)


def test_attention_of_qkv_means_a_rotation_a_cache_write_and_attention(rng):
    shape, width, slots, boundary = (4, 2, 8), 3, 80, 62
    heads, kv_heads, head_dim = shape
    qkv = rng.normal(size=(width, (heads + 2 * kv_heads) * head_dim)).astype(np.float32)
    position = rng.integers(0, 20, width).astype(np.int32)
    table = rng.normal(size=(20, head_dim // 2, 2)).astype(np.float32)
    cache = rng.normal(size=(2, kv_heads, slots, head_dim)).astype(np.float16)
    cache[:, :, boundary + width :] = np.nan
    visible = np.array([[1, 0], [3, 0], [5, 0]], np.uint32)
    at = np.array([boundary], np.int32)
    parts = [np.zeros((width, heads, CHAINS), np.float32) for _ in range(2)]
    parts.append(np.zeros((width, heads, CHAINS, head_dim), np.float32))

    def run(func, *arguments):
        return cpu_kernels.run(bind_dims(func, {"width": width}), list(arguments))

    given, q = [qkv, position, at, table, cache], np.zeros((width, heads, head_dim), np.float32)
    *_, written, q = run(ops.rope_kv_write(*shape, 20, slots), *given, q)
    func = attention_ops.attention_parts(*shape, slots)
    want = run(func, q, written, at, visible, *parts)[-3:]
    func = fused_attention_ops.rope_attention_parts(*shape, 20, slots)
    got = run(func, *given, visible, *parts)
    assert np.array_equal(got[4], written, equal_nan=True)
    for found, expected in zip(got[-3:], want, strict=True):
        np.testing.assert_allclose(found[:, :, :2], expected[:, :, :2], rtol=1e-5, atol=1e-6)
