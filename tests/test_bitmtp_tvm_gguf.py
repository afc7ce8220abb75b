"""GGUF checkpoints, tensor by tensor, against the weights that they were written from."""

import gguf
import gguf_models
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Packaged
from gguf_blocks import TYPES, decode, encode
from gguf_bytes import Tensor
from transformers import BitNetConfig, BitNetForCausalLM, Qwen3Config, Qwen3ForCausalLM

from bitmtp_tvm.checkpoint import dense_shapes, matrix_shapes, open_checkpoint
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.reference.model import ReferenceModel
from relax_models.config import YarnConfig
from relax_models.formats import bf16_bits, bf16_to_float32

GROUPED = ("Q1_0", "Q2_0", "Q2_0 wide", "PQ2_0", "TQ1_0", "TQ2_0")


def weights_of(checkpoint):
    """Our names to float32 weights, as the compiler will compute with them."""
    config = checkpoint.config
    weights = {}
    for name, shape in matrix_shapes(config).items():
        codes, scale = checkpoint.low_bit(name)
        assert codes.shape == shape and codes.dtype == np.uint8
        if config.weight_format == "bitnet-ternary":
            assert isinstance(scale, float)
            weights[name] = (codes.astype(np.float32) - 1) * np.float32(scale)
            continue
        assert scale.shape == (shape[0], shape[1] // 128) and scale.dtype == np.float16
        double = 2 if config.weight_format == "binary-g128" else 1
        spread = np.repeat(scale.astype(np.float32), 128, axis=1)
        weights[name] = (codes.astype(np.float32) * double - 1) * spread
    for name, shape in dense_shapes(config).items():
        values = checkpoint.dense(name)
        assert values.shape == shape
        weights[name] = bf16_to_float32(values) if name == "embed" else values
    return weights


def assert_same(got, truth):
    assert got.keys() == truth.keys()
    for name, weight in truth.items():
        np.testing.assert_array_equal(got[name], weight, name)


def rounded(truth):
    """A BitNet's embedding is kept in bfloat16."""
    return truth | {"embed": bf16_to_float32(bf16_bits(truth["embed"]))}


@pytest.mark.parametrize("kind", ["I2_S", "TQ1_0", "TQ2_0", "F32", "F16"])
def test_bitnet(tmp_path, kind):
    file, truth = gguf_models.bitnet(kind, seed=1)
    checkpoint = open_checkpoint(file.write(tmp_path / "tiny.gguf"))
    assert_same(weights_of(checkpoint), rounded(truth))
    scales = {checkpoint.low_bit(name)[1] for name in matrix_shapes(checkpoint.config)}
    assert len(scales) == 14
    config = checkpoint.config
    assert (config.architecture, config.weight_format) == ("bitnet", "bitnet-ternary")
    assert (config.vocab_size, config.head_dim, config.num_key_value_heads) == (400, 64, 2)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-5, 500000.0)
    assert (config.quantization, checkpoint.name) == (f"gguf {kind}", "tiny")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", GROUPED)
def test_qwen3(tmp_path, kind, tied):
    file, truth = gguf_models.qwen3(kind, seed=2, tied=tied)
    checkpoint = open_checkpoint(file.write(tmp_path / "tiny.gguf"))
    assert_same(weights_of(checkpoint), truth)
    config = checkpoint.config
    wanted = "binary-g128" if kind == "Q1_0" else "ternary-g128"
    assert (config.weight_format, config.tie_word_embeddings) == (wanted, tied)
    assert config.quantization == f"gguf {kind.split()[0]}"
    assert (config.rms_norm_eps, config.head_dim, config.rope_scaling) == (1e-6, 128, None)


@pytest.mark.parametrize("kind", [*GROUPED, "I2_S"])
def test_the_scalar_decoder_reads_the_same_file(tmp_path, kind):
    file, _ = getattr(gguf_models, "bitnet" if kind == "I2_S" else "qwen3")(kind, blocks=1)
    got = weights_of(open_checkpoint(file.write(tmp_path / "tiny.gguf")))
    for name, (ours, _, columns) in gguf_models.MATRICES.items():
        tensor = file.tensors[f"blk.0.{name}.weight"]
        expected = decode(kind, tensor.data, columns)
        np.testing.assert_array_equal(got[f"layers.0.{ours}"], expected, name)


@pytest.mark.parametrize(
    ("architecture", "activation"),
    [("bitnet-b1.58", "relu2"), ("bitnet-25", "relu2"), ("bitnet", "silu")],
)
def test_the_architecture_decides_the_activation_unless_a_key_does(
    tmp_path, architecture, activation
):
    file, _ = gguf_models.bitnet("I2_S", architecture, blocks=1)
    path = tmp_path / "tiny.gguf"
    assert open_checkpoint(file.write(path)).config.hidden_act == activation
    for key, value, wanted in (("hidden_act", "silu", "silu"), ("activation", "ReLU2", "relu2")):
        file.set(f"{architecture}.{key}", "str", value)
        assert open_checkpoint(file.write(path)).config.hidden_act == wanted
        del file.keys[f"{architecture}.{key}"]


@pytest.mark.parametrize("number", [1, 0])
def test_old_files_with_a_scale_of_their_own(tmp_path, number):
    """Weights of -1, 0 and 1, and beside each matrix its scale, which multiplies."""
    file, truth = gguf_models.bitnet("F32", "bitnet", seed=3, blocks=1)
    for name, (ours, n, k) in gguf_models.MATRICES.items():
        weights = truth[f"layers.0.{ours}"]
        scale = np.abs(weights).max()
        signs = np.sign(weights).astype("<f2" if number else "<f4")
        file.tensors[f"blk.0.{name}.weight"] = Tensor((n, k), number, signs.tobytes())
        file.tensors[f"blk.0.{name}.scale"] = Tensor((1,), 0, scale.astype("<f4").tobytes())
    assert_same(weights_of(open_checkpoint(file.write(tmp_path / "old.gguf"))), rounded(truth))


@pytest.mark.parametrize("value", [0.0, -1.0, np.inf])
def test_a_scale_of_its_own_must_be_positive(tmp_path, value):
    file, _ = gguf_models.bitnet("F32", "bitnet", blocks=1)
    file.tensors["blk.0.attn_q.scale"] = Tensor((1,), 0, np.array([value], "<f4").tobytes())
    checkpoint = open_checkpoint(file.write(tmp_path / "old.gguf"))
    with pytest.raises(BitMTPError, match=r"blk\.0\.attn_q\.scale"):
        checkpoint.low_bit("layers.0.q_proj")


def test_a_matrix_of_zeros(tmp_path):
    file, _ = gguf_models.bitnet("TQ2_0", blocks=1)
    zeros = encode("TQ2_0", np.ones((256, 256), np.uint8), np.zeros((256, 1)))
    file.tensors["blk.0.attn_q.weight"].data = zeros
    codes, scale = open_checkpoint(file.write(tmp_path / "zeros.gguf")).low_bit("layers.0.q_proj")
    assert np.all(codes == 1) and scale > 0


def test_codes_under_a_scale_of_zero_are_zeros(tmp_path):
    file, _ = gguf_models.bitnet("TQ1_0", blocks=1)
    codes = np.random.default_rng(0).integers(0, 3, (256, 256)).astype(np.uint8)
    scales = np.full((256, 1), 0.5)
    scales[3] = 0
    file.tensors["blk.0.attn_q.weight"].data = encode("TQ1_0", codes, scales)
    got, scale = open_checkpoint(file.write(tmp_path / "a.gguf")).low_bit("layers.0.q_proj")
    codes[3] = 1
    np.testing.assert_array_equal(got, codes)
    assert scale == 0.5


def test_binary_and_ternary_matrices_in_one_file(tmp_path):
    file, truth = gguf_models.qwen3("Q2_0 wide", blocks=1)
    one, other = gguf_models.qwen3("Q1_0", seed=9, blocks=1)
    file.tensors["token_embd.weight"] = one.tensors["token_embd.weight"]
    truth["embed"] = other["embed"]
    checkpoint = open_checkpoint(file.write(tmp_path / "mixed.gguf"))
    assert checkpoint.config.weight_format == "ternary-g128"
    assert checkpoint.config.quantization == "gguf Q1_0 and Q2_0"
    assert_same(weights_of(checkpoint), truth)


@pytest.mark.parametrize("kind", ["BF16", "F16", "F32", "Q4_0", "Q8_0", "Q4_K", "Q6_K"])
def test_an_embedding_of_any_type_that_the_package_reads(tmp_path, kind):
    file, truth = gguf_models.bitnet("I2_S", blocks=1)
    packaged = Packaged[kind]
    table = truth["embed"]
    if kind in ("Q4_K", "Q6_K"):  # which the package reads, but cannot write
        group, size = gguf.GGML_QUANT_SIZES[packaged]
        stored = np.random.default_rng(1).integers(0, 60, (400, 256 // group * size), np.uint8)
    else:
        stored = gguf.quantize(table, packaged)
    file.tensors["token_embd.weight"] = Tensor((400, 256), int(packaged), stored.tobytes())
    expected = gguf.dequantize(stored, packaged)
    got = open_checkpoint(file.write(tmp_path / "a.gguf")).dense("embed")
    np.testing.assert_array_equal(got, bf16_bits(expected))
    assert np.ptp(expected) > 0


def test_norms_of_half_precision(tmp_path):
    file, truth = gguf_models.qwen3("Q1_0", blocks=1)
    for name, tensor in file.tensors.items():
        if tensor.number == 0:
            values = np.frombuffer(tensor.data, "<f4").astype("<f2")
            file.tensors[name] = Tensor(tensor.shape, 1, values.tobytes())
    halves = {k: v.astype(np.float16).astype(np.float32) for k, v in truth.items() if v.ndim == 1}
    assert_same(weights_of(open_checkpoint(file.write(tmp_path / "a.gguf"))), truth | halves)


# ---- what the keys say


def test_yarn(tmp_path):
    file, _ = gguf_models.qwen3("Q1_0", blocks=1)
    path = tmp_path / "tiny.gguf"
    file.set("qwen3.rope.scaling.type", "str", "yarn")
    file.set("qwen3.rope.scaling.factor", "f32", 4.0)
    with pytest.raises(BitMTPError, match="original_context_length"):
        open_checkpoint(file.write(path))
    file.set("qwen3.rope.scaling.original_context_length", "u32", 24)
    assert open_checkpoint(file.write(path)).config.rope_scaling == YarnConfig(4.0, 24)
    file.set("qwen3.rope.scaling.yarn_beta_fast", "f32", 16.0)
    file.set("qwen3.rope.scaling.yarn_beta_slow", "f32", 2.0)
    file.set("qwen3.rope.scaling.attn_factor", "f32", 0.5)
    got = open_checkpoint(file.write(path)).config.rope_scaling
    assert (got.beta_fast, got.beta_slow) == (16.0, 2.0)
    assert got.attention_factor == pytest.approx(0.5 * (0.1 * np.log(4.0) + 1))
    file.set("qwen3.rope.scaling.factor", "f32", 0.5)
    with pytest.raises(BitMTPError, match="factor"):
        open_checkpoint(file.write(path))


def test_scaling_by_one_is_no_scaling(tmp_path):
    file, _ = gguf_models.bitnet("I2_S", "bitnet", blocks=1)
    file.set("bitnet.rope.scaling.type", "str", "linear")
    file.set("bitnet.rope.scaling.factor", "f32", 1.0)
    assert open_checkpoint(file.write(tmp_path / "a.gguf")).config.rope_scaling is None


def test_options_for_multi_token_prediction(tmp_path):
    file, _ = gguf_models.qwen3("Q1_0", blocks=1)
    path = file.write(tmp_path / "tiny.gguf")
    assert open_checkpoint(path).config.mtp is None
    mtp = open_checkpoint(path, mask_token_id=399, block_size=4).config.mtp
    assert (mtp.mask_token_id, mtp.block_size) == (399, 4)
    with pytest.raises(BitMTPError, match="400"):
        open_checkpoint(path, mask_token_id=400, block_size=4)
    with pytest.raises(UsageError, match="--block-size"):
        open_checkpoint(path, mask_token_id=3)


# ---- weights that are not low-bit yet


def widened(truth, keep=()):
    """A Qwen3 whose matrices are float32, the values of `truth`, but for those in `keep`."""
    file, _ = gguf_models.qwen3("Q1_0", blocks=1)
    names = {f"blk.0.{name}.weight": f"layers.0.{m[0]}" for name, m in gguf_models.MATRICES.items()}
    for stored, ours in {**names, "token_embd.weight": "embed"}.items():
        if ours not in keep:
            data = truth[ours].astype("<f4").tobytes()
            file.tensors[stored] = Tensor(truth[ours].shape, 0, data)
    return file


@pytest.mark.parametrize(("kind", "quant"), [("Q1_0", "binary-g128"), ("PQ2_0", "ternary-g128")])
def test_unpacked_weights_are_recovered_with_an_explicit_rule(tmp_path, kind, quant):
    _, truth = gguf_models.qwen3(kind, blocks=1)
    file = widened(truth)
    path = file.write(tmp_path / "wide.gguf")
    with pytest.raises(UsageError, match="--quant"):
        open_checkpoint(path)
    checkpoint = open_checkpoint(path, quant=quant)
    got = weights_of(checkpoint)
    for name in matrix_shapes(checkpoint.config):
        np.testing.assert_array_equal(got[name], truth[name])
    assert checkpoint.config.weight_format == quant
    assert checkpoint.config.quantization.startswith(f"gguf F32 {quant}")


def test_a_rule_must_fit_the_matrices_that_are_low_bit_already(tmp_path):
    binary, truth = gguf_models.qwen3("Q1_0", blocks=1)
    path = widened(truth, keep=[name for name in truth if name != "embed"]).write(tmp_path / "a")
    assert weights_of(open_checkpoint(path, quant="binary-g128"))["embed"].shape == (400, 256)
    with pytest.raises(BitMTPError, match=r"Q1_0 matrices.*--quant ternary-g128"):
        open_checkpoint(path, quant="ternary-g128")
    with pytest.raises(UsageError, match="low-bit already"):
        open_checkpoint(binary.write(tmp_path / "b"), quant="binary-g128")
    bitnet = gguf_models.bitnet("I2_S", blocks=1)[0]
    with pytest.raises(UsageError, match="BitNet"):
        open_checkpoint(bitnet.write(tmp_path / "c"), quant="ternary-g128")


# ---- files that the package writes, from the models of transformers


def written_by_the_package(path, model, architecture, kinds):
    """The weights of a transformers model under the names that the package gives them.

    `kinds`: from a Hugging Face name's last words to the type; float32 for all others.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_string(f"{gguf.MODEL_ARCH_NAMES[architecture]}.hidden_act", config.hidden_act)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, parameter in model.state_dict().items():
        older = name.replace("attn_sub_norm", "inner_attn_ln").replace(
            "ffn_sub_norm", "ffn_layernorm"
        )
        stored = names.get_name(older, try_suffixes=(".weight",))
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.float().numpy()
        kind = next((kind for end, kind in kinds.items() if name.endswith(end)), None)
        if kind is None:
            writer.add_tensor(stored, values)
        else:
            data = gguf.quantize(values, kind)
            writer.add_tensor(stored, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def ternary_(parameter, group, generator):
    """Fill with -d, 0 and d, another d for every `group` weights, float16; each d does occur."""
    codes = torch.randint(-1, 2, parameter.shape, generator=generator).float().view(-1, group)
    codes[:, 0] = 1
    scales = (torch.randperm(len(codes), generator=generator) % 900 + 64) / 16384
    parameter.data.copy_((codes * scales[:, None]).view(parameter.shape))


@pytest.mark.parametrize("kind", [Packaged.TQ1_0, Packaged.TQ2_0])
def test_a_qwen3_that_the_package_wrote(tmp_path, kind):
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    generator = torch.Generator().manual_seed(5)
    model = Qwen3ForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            ternary_(parameter, 256, generator)
        else:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
    kinds = dict.fromkeys(("_proj.weight", "embed_tokens.weight", "lm_head.weight"), kind)
    path = written_by_the_package(tmp_path / "q.gguf", model, gguf.MODEL_ARCH.QWEN3, kinds)
    checkpoint = open_checkpoint(path)
    assert checkpoint.tokenizer_json() is None and not checkpoint.config.tie_word_embeddings
    assert_same_logits(checkpoint, model, QWEN3_NAMES)


@pytest.mark.parametrize("kind", [Packaged.TQ1_0, Packaged.TQ2_0, Packaged.F16])
def test_a_bitnet_that_the_package_wrote(tmp_path, kind):
    config = BitNetConfig(
        vocab_size=96,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    config.head_dim = 64
    generator = torch.Generator().manual_seed(6)
    model = BitNetForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "_proj" in name:
            ternary_(parameter, parameter.numel(), generator)
            parameter.data *= 1 + len(name) + int(name.split(".")[2])
        elif parameter.ndim == 2:
            parameter.data.copy_(torch.randn(96, 256, generator=generator).bfloat16())
        else:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
    kinds = {"_proj.weight": kind, "embed_tokens.weight": Packaged.BF16}
    path = written_by_the_package(tmp_path / "b.gguf", model, gguf.MODEL_ARCH.BITNET, kinds)
    assert_same_logits(open_checkpoint(path), model, BITNET_NAMES)


COMMON_NAMES = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
}
QWEN3_NAMES = COMMON_NAMES | {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
BITNET_NAMES = COMMON_NAMES | {
    "attn_sub_norm": "self_attn.attn_sub_norm",
    "ffn_sub_norm": "mlp.ffn_sub_norm",
}


def assert_same_logits(checkpoint, model, names):
    """The logits of `model`: bit for bit from a second model with the checkpoint's weights, and
    but for rounding from the numpy twin.
    """
    state = {}
    for name, values in weights_of(checkpoint).items():
        layer, _, last = name.rpartition(".")
        stem = f"model.{layer}.{names[last]}" if layer else TOP_NAMES[name]
        state[f"{stem}.weight"] = torch.tensor(values)
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    second = type(model)(model.config).eval()
    second.load_state_dict(state)
    tokens = torch.arange(40)[None] * 7 % 96
    with torch.no_grad():
        expected, got = model(tokens).logits, second(tokens).logits
    assert torch.equal(got, expected)
    twin = ReferenceModel.from_checkpoint(checkpoint, 40, float_activations=True)
    logits = twin.forward(tokens[0].numpy(), range(40), 0, None, twin.new_cache(40))
    difference = np.abs(logits - expected[0].numpy()).max()
    assert difference < 2e-5 * expected.abs().max(), difference


TOP_NAMES = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


def test_the_package_reads_what_the_tests_write(tmp_path):
    """The tests' own writer, checked by the package's reader on the types that it knows."""
    file, truth = gguf_models.qwen3("TQ2_0", blocks=1)
    reader = gguf.GGUFReader(file.write(tmp_path / "a.gguf"))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors.keys() == file.tensors.keys()
    got = gguf.dequantize(tensors["blk.0.ffn_down.weight"].data, Packaged.TQ2_0)
    np.testing.assert_array_equal(got, truth["layers.0.down_proj"])
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    assert tokens == file.keys["tokenizer.ggml.tokens"][1]
    assert set(TYPES.values()) >= {(35, 256, 66)}
