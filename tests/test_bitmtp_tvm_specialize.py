"""Symbolic functions become one per bucket, with static kernels that are shared where equal."""

import pytest
from tvm import relax, tirx

from bitmtp_tvm.specialize import Bucket, bind_shapes, buckets, specialize
from relax_models import ops
from relax_models.bitnet import BitNet
from relax_models.config import ModelConfig
from relax_models.layers import Storage
from schedules.workload import read

TINY = ModelConfig(
    architecture="bitnet",
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=32,
    hidden_act="relu2",
    tie_word_embeddings=True,
)


def model():
    return BitNet(TINY, Storage("llvm", 48, 32)).export()


def test_buckets_are_decode_widths_and_all_prefill_widths():
    found = buckets((4, 1), (16,))
    assert [bucket.name for bucket in found] == [
        "step_w1",
        "step_w4",
        "decode_w1",
        "decode_w4",
        "prefill_w1",
        "prefill_w4",
        "prefill_w16",
    ]


def test_every_kernel_is_static_and_of_its_bucket():
    mod = specialize(model()[0], buckets((1, 4), (16,)))
    kernels = {v.name_hint: f for v, f in mod.functions.items() if isinstance(f, tirx.PrimFunc)}
    for name, func in kernels.items():
        work = read(func)
        width = int(name.rsplit("_w", 1)[1])
        # The last buffer of `accept` is as long as the vocabulary.
        assert work.width == (TINY.vocab_size if work.op == "accept" else width), name
    entries = {v.name_hint for v, f in mod.functions.items() if isinstance(f, relax.Function)}
    assert entries == {b.name for b in buckets((1, 4), (16,))}


def test_equal_kernels_are_shared_between_layers_and_entries():
    mod = specialize(model()[0], [Bucket("decode", 4), Bucket("prefill", 4)])
    names = [v.name_hint for v, f in mod.functions.items() if isinstance(f, tirx.PrimFunc)]
    # Four linears, attention in both kinds, and one of each of the other seven.
    assert len(names) == 4 + 2 + 7
    both = specialize(model()[0], [Bucket("step", 4), Bucket("decode", 4)])
    names = [v.name_hint for v, f in both.functions.items() if isinstance(f, tirx.PrimFunc)]
    # Only the choice of tokens differs: greedy, or the two ends of a step with the choice between.
    assert len(names) == 4 + 1 + 6 + 1 + 4


def test_parameters_follow_the_inputs_in_both_entries():
    mod, names = model()
    for entry, inputs in (("step", 9), ("decode", 5), ("prefill", 3)):
        given = [param.name for param in mod[entry].params]
        assert given[inputs:] == names
    assert [name for name in names if name.endswith("kv.cache")] == [
        "layers.0.kv.cache",
        "layers.1.kv.cache",
    ]


def test_dimensions_that_disagree_are_an_error():
    func = ops.norm_quantize(8, 1e-5)
    shapes = [[2, 8], [8], [3, 128], [2], [2]]
    with pytest.raises(ValueError, match="both 2 and 3"):
        bind_shapes(func, shapes)
