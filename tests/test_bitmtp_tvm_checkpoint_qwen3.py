import contextlib
import json
import shutil
from random import Random

import numpy as np
import pytest
from checkpoint_edits import edit_json, edit_tensors, read_all, refused
from qwen3_checkpoint import TIED, UNTIED, load_qwen3, write_qwen3
from tokenizers import Tokenizer, models

from bitmtp_tvm.checkpoint import dense_shapes, matrix_shapes, open_checkpoint
from bitmtp_tvm.checkpoint.safetensors_file import SafetensorsFile
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.reference import dequantize
from bitmtp_tvm.weights import rope_table
from relax_models.config import MTPConfig, YarnConfig
from relax_models.formats import FORMATS
from relax_models.quantizers import QUANTIZERS, get_quantizer

SINGLE = "model.safetensors"
TERNARY, BINARY = {"quant": "ternary-g128"}, {"quant": "binary-g128"}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Q0 = "model.layers.0.self_attn.q_proj.weight"

# Sizes, bits (None: latent weights), element type, bytes a shard.
FILES = {
    "ternary-tied": (TIED, 2, "BF16", None),
    "binary-untied": (UNTIED, 1, "F16", 300_000),
    "binary-tied": (TIED, 1, "F32", 40_000),
    "latent-tied": (TIED, None, "BF16", None),
    "latent-untied": (UNTIED, None, "F16", 200_000),
}
BITS = {name: bits for name, (_, bits, _, _) in FILES.items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    stored = {
        name: write_qwen3(root / name, sizes, seed, bits, dtype, shard)
        for seed, (name, (sizes, bits, dtype, shard)) in enumerate(FILES.items())
    }
    return {name: (root / name, values) for name, values in stored.items()}


@pytest.fixture
def tied(written, tmp_path):
    """A checkpoint of its own for each test to damage."""
    shutil.copytree(written["ternary-tied"][0], tmp_path / "tied")
    return tmp_path / "tied"


@pytest.fixture
def untied(written, tmp_path):
    """The same with a head, in shards."""
    shutil.copytree(written["binary-untied"][0], tmp_path / "untied")
    return tmp_path / "untied"


def hf_name(name):
    """Our name of a tensor to the one in the file, written down once more."""
    if name in ("embed", "head", "norm"):
        return {"embed": EMBED, "head": HEAD, "norm": "model.norm.weight"}[name]
    _, layer, part = name.split(".")
    inner = f"mlp.{part}" if part in ("gate_proj", "up_proj", "down_proj") else f"self_attn.{part}"
    inner = {"input_norm": "input_layernorm"}.get(part, inner)
    inner = {"post_attention_norm": "post_attention_layernorm"}.get(part, inner)
    return f"model.layers.{layer}.{inner}.weight"


@pytest.mark.parametrize("name", ["ternary-tied", "binary-untied", "binary-tied"])
def test_unpacked_files_come_back_bit_for_bit(written, name):
    directory, stored = written[name]
    quant = "binary-g128" if BITS[name] == 1 else "ternary-g128"
    checkpoint = open_checkpoint(directory, quant=quant)
    seen = set()
    for matrix, shape in matrix_shapes(checkpoint.config).items():
        codes, scales = checkpoint.low_bit(matrix)
        assert codes.shape == shape and codes.dtype == np.uint8
        assert scales.shape == (shape[0], shape[1] // 128) and scales.dtype == np.float16
        weights = dequantize(codes, scales, BITS[name])
        np.testing.assert_array_equal(weights, stored[hf_name(matrix)])
        seen.add(hf_name(matrix))
        assert len(np.unique(scales)) > 40
    for norm, shape in dense_shapes(checkpoint.config).items():
        values = checkpoint.dense(norm)
        assert values.shape == shape and values.dtype == np.float32
        np.testing.assert_array_equal(values, stored[hf_name(norm)])
        seen.add(hf_name(norm))
    assert seen == stored.keys()


@pytest.mark.parametrize("quant", QUANTIZERS)
@pytest.mark.parametrize("name", ["latent-tied", "latent-untied"])
def test_latent_weights_are_quantised_by_the_rule_that_was_asked_for(written, name, quant):
    directory, stored = written[name]
    threshold = None if quant == "binary-g128" else 0.7
    checkpoint = open_checkpoint(directory, quant=quant, quant_threshold=threshold)
    quantizer = get_quantizer(quant, threshold)
    assert checkpoint.config.weight_format == quantizer.format
    assert checkpoint.config.quantization == quantizer.describe()
    for matrix in matrix_shapes(checkpoint.config):
        codes, scales = checkpoint.low_bit(matrix)
        wanted, wanted_scales = quantizer.quantize(stored[hf_name(matrix)])
        np.testing.assert_array_equal(codes, wanted)
        np.testing.assert_array_equal(scales, wanted_scales)
        assert codes.max() == FORMATS[quantizer.format].bits


def test_the_configuration_is_that_of_the_file(written):
    config = open_checkpoint(written["binary-untied"][0], **BINARY).config
    for key, value in UNTIED.items():
        if key != "rope_parameters":
            assert getattr(config, key) == value
    assert (config.architecture, config.hidden_act) == ("qwen3", "silu")
    assert (config.rms_norm_eps, config.rope_theta) == (1e-6, 1e6)
    assert config.rope_scaling == YarnConfig(4.0, 1024)
    assert config.mtp is None
    ids = open_checkpoint(written["ternary-tied"][0], **TERNARY)
    assert (ids.bos_token_id, ids.eos_token_ids, ids.add_bos) == (None, (2,), False)


def test_rows_of_the_vocabulary_are_those_of_the_tensor(tied):
    edit_json(tied / "config.json", lambda config: config.update(vocab_size=64))
    assert read_all(tied, **TERNARY).config.vocab_size == 61


# ---- options


def test_without_a_rule_nothing_is_guessed(tied):
    refused(tied, str(tied), "--quant", "binary-g128, ternary-g128")
    with pytest.raises(UsageError):
        open_checkpoint(tied)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"quant": "q4"}, ["--quant", "'q4'", "binary-g128"]),
        ({"quant_threshold": 0.5}, ["--quant-threshold needs --quant"]),
        ({"quant": "binary-g128", "quant_threshold": 0.5}, ["binary-g128 has no threshold"]),
        ({"quant": "ternary-g128", "quant_threshold": 2.0}, ["threshold is 2.0"]),
    ],
)
def test_impossible_rules(tied, options, parts):
    refused(tied, *parts, **options)
    with pytest.raises(UsageError):
        open_checkpoint(tied, **options)


MTP = {"mask_token_id": 60, "block_size": 4}


def test_multi_token_prediction_from_the_options(tied):
    assert open_checkpoint(tied, **TERNARY, **MTP).config.mtp == MTPConfig(4, 60)


def test_multi_token_prediction_from_the_file(tied):
    edit_json(tied / "config.json", lambda config: config.update(mtp=MTP))
    for options in ({}, MTP, {"block_size": 4}):
        assert open_checkpoint(tied, **TERNARY, **options).config.mtp == MTPConfig(4, 60)


def test_multi_token_prediction_from_both(tied):
    stored = {"mask_token_id": 60, "block_attention": "bidirectional"}
    edit_json(tied / "config.json", lambda config: config.update(mtp=stored))
    config = open_checkpoint(tied, **TERNARY, block_size=4).config
    assert config.mtp == MTPConfig(4, 60, block_attention="bidirectional")


@pytest.mark.parametrize(
    ("stored", "options", "parts"),
    [
        (None, {"block_size": 4}, ["mtp.mask_token_id", "--mask-token-id"]),
        (None, {"mask_token_id": 60}, ["mtp.block_size", "--block-size"]),
        ({"mask_token_id": 60}, {}, ["mtp lacks block_size"]),
        (MTP, {"mask_token_id": 59}, ["mtp.mask_token_id 60", "--mask-token-id says 59"]),
        (MTP, {"block_size": 8}, ["mtp.block_size 4", "--block-size says 8"]),
        (None, MTP | {"mask_token_id": 61}, ["mask_token_id is 61", "61 rows"]),
        (None, MTP | {"block_size": 0}, ["mtp.block_size is 0"]),
        ([4], MTP, ["mtp must be an object"]),
    ],
)
def test_multi_token_prediction_is_never_guessed(tied, stored, options, parts):
    edit_json(tied / "config.json", lambda config: config.update(mtp=stored))
    refused(tied, *parts, **TERNARY, **options)


# ---- tying


def add_head(path, change=lambda data: data):
    def edit(tensors):
        embed = tensors[EMBED]
        tensors[HEAD] = {**embed, "data": change(embed["data"])}

    edit_tensors(path, edit)


def test_a_tied_head_that_is_stored_once_more_is_the_embedding(tied, written):
    add_head(tied / SINGLE)
    checkpoint = read_all(tied, **TERNARY)
    embed = dequantize(*checkpoint.low_bit("embed"), 2)
    np.testing.assert_array_equal(embed, written["ternary-tied"][1][EMBED])


def test_a_tied_head_that_is_another_matrix(tied):
    add_head(tied / SINGLE, lambda data: data[:-2] + b"\x00\x40")
    refused(tied, SINGLE, HEAD, EMBED, "tie_word_embeddings", **TERNARY)


def test_a_tied_head_of_another_shape(tied):
    def edit(tensors):
        tensors[HEAD] = tensors["model.norm.weight"]

    edit_tensors(tied / SINGLE, edit)
    refused(tied, HEAD, "shape (128,)", **TERNARY)


def test_no_head_though_it_is_not_tied(tied):
    edit_json(tied / "config.json", lambda config: config.update(tie_word_embeddings=False))
    refused(tied, HEAD, "tie_word_embeddings", **TERNARY)


def test_a_head_of_its_own_though_it_is_tied(untied):
    edit_json(untied / "config.json", lambda config: config.update(tie_word_embeddings=True))
    refused(untied, HEAD, EMBED, "tie_word_embeddings", **BINARY)


def test_a_head_with_fewer_rows_than_the_embedding(untied):
    index = json.loads((untied / f"{SINGLE}.index.json").read_text())["weight_map"]

    def edit(tensors):
        rows, columns = tensors[HEAD]["shape"]
        tensors[HEAD]["shape"] = [rows - 1, columns]
        tensors[HEAD]["data"] = tensors[HEAD]["data"][: -2 * columns]

    edit_tensors(untied / index[HEAD], edit)
    refused(untied, HEAD, "(82, 256)", "(83, 256)", **BINARY)


# ---- what the configuration may not say


CONFIG_FAULTS = [
    ({"hidden_act": "relu2"}, "hidden_act is 'relu2'; qwen3"),
    ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
    ({"architectures": ["Qwen3ForCausalLM", "BitNetForCausalLM"]}, "architectures"),
    ({"architectures": []}, "architectures"),
    ({"model_type": "bitnet"}, "model_type is 'bitnet'"),
    ({"tie_word_embeddings": None}, "tie_word_embeddings is None"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ({"quantization": {"group_size": 128, "bits": 1}}, "quantization is {'group_size'"),
    ({"attention_bias": True}, "attention_bias is True"),
    ({"use_sliding_window": True}, "use_sliding_window is True"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"layer_types": 3}, "layer_types is 3"),
    ({"hadamard_dim": 128}, "hadamard_dim asks for a Hadamard rotation"),
    ({"hidden_size": 64, "head_dim": 32}, "hidden_size is 64; ternary-g128 needs a multiple"),
    ({"head_dim": 16}, "num_attention_heads * head_dim is 64"),
    ({"intermediate_size": 256}, "shape"),
    ({"num_key_value_heads": 1}, "shape"),
    ({"num_hidden_layers": 3}, "lacks tensor model.layers.2."),
    ({"num_hidden_layers": 1}, "has no place for"),
    ({"eos_token_id": 61}, "eos_token_id is 61"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters"),
    ({"rope_parameters": {"rope_type": "default"}}, "lacks rope_theta"),
]


@pytest.mark.parametrize(("change", "part"), CONFIG_FAULTS)
def test_configuration_faults(tied, change, part):
    edit_json(tied / "config.json", lambda config: config.update(change))
    refused(tied, str(tied), part, **TERNARY)


def test_no_value_of_any_key_escapes(tied):
    """Opens, or is refused in one sentence, whatever stands in config.json."""
    path = tied / "config.json"
    config = json.loads(path.read_text()) | {"rope_scaling": None, "mtp": MTP, "quantization": None}
    strange = [None, True, -1, 0, 1, 2.5, 1 << 80, float("nan"), "x", [], [{}], {}, {"a": [0]}]
    for key in config:
        for value in strange:
            path.write_text(json.dumps(config | {key: value}))
            # Every fault that is found is one of these; any other exception fails the test.
            with contextlib.suppress(BitMTPError):
                read_all(tied, **TERNARY)


# ---- YaRN


YARN = {"factor": 2.5, "original_max_position_embeddings": 32}


def set_rope(directory, **keys):
    def edit(config):
        config.pop("rope_parameters")
        config.update(keys)

    edit_json(directory / "config.json", edit)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "rope_type": "yarn", **YARN}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}},
        {
            "rope_theta": 1e6,
            "rope_scaling": {"type": "yarn", "factor": 2.5},
            "original_max_position_embeddings": 32,
        },
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN, "beta_fast": 8}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN, "beta_slow": 0.25}},
        {"rope_parameters": {"type": "yarn", "rope_theta": 1e6, **YARN, "attention_factor": 0.5}},
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                **YARN,
                "mscale": 0.8,
                "mscale_all_dim": 0.3,
            }
        },
    ],
)
def test_rotary_tables_are_those_of_transformers(tied, keys):
    set_rope(tied, **keys)
    config = open_checkpoint(tied, **TERNARY).config
    assert config.rope_scaling.factor == 2.5
    check_rope(tied, config)


def check_rope(directory, config):
    import torch

    rotary = load_qwen3(directory).model.rotary_emb
    wanted = rotary(torch.zeros(1), torch.arange(9000)[None])
    half = config.head_dim // 2
    table = rope_table(config, 9000)
    for part in range(2):
        np.testing.assert_allclose(table[..., part], wanted[part][0, :, :half], atol=2e-6)
    return table


def test_rotary_tables_of_the_written_files(written):
    plain = check_rope(
        written["ternary-tied"][0], open_checkpoint(written["ternary-tied"][0], **TERNARY).config
    )
    assert np.abs(plain).max() == 1
    stretched = check_rope(
        written["binary-untied"][0], open_checkpoint(written["binary-untied"][0], **BINARY).config
    )
    assert stretched[0, 0, 0] == pytest.approx(0.1 * np.log(4) + 1)


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"type": "yarn", **YARN, "factor": None}}, "lacks its factor"),
        ({"rope_scaling": {"type": "yarn", **YARN, "factor": "4"}}, "factor is '4'"),
        ({"rope_scaling": {"type": "yarn", **YARN, "factor": 0.5}}, "factor is 0.5"),
        ({"rope_scaling": {"type": "yarn", **YARN, "finetuned": True}}, "'finetuned': True"),
        ({"rope_scaling": {"type": "yarn", **YARN, "truncate": False}}, "'truncate': False"),
        ({"rope_scaling": {"type": "yarn", "rope_type": "default", **YARN}}, "rope_scaling"),
        ({"rope_scaling": {"type": "yarn", **YARN, "mscale": -1, "mscale_all_dim": 1}}, "mscale"),
        ({"rope_scaling": {"type": "yarn", **YARN}, "rope_theta": 1.0}, "rope_theta is 1.0"),
        (
            {
                "rope_scaling": {"type": "yarn", **YARN},
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            },
            "rotary scaling differs",
        ),
        (
            {"rope_scaling": {"type": "yarn", **YARN}, "original_max_position_embeddings": 64},
            "original_max_position_embeddings differs",
        ),
    ],
)
def test_faults_of_yarn(tied, keys, part):
    set_rope(tied, **{"rope_theta": 1e6, **keys})
    refused(tied, "config.json", part, **TERNARY)


# ---- tensors


@pytest.mark.parametrize(("name", "dtype"), [(Q0, "U16"), (EMBED, "I16"), (Q0, "F8_E4M3")])
def test_wrong_element_types(tied, name, dtype):
    def edit(tensors):
        entry = tensors[name]
        entry["dtype"] = dtype
        if dtype == "F8_E4M3":
            entry["data"] = entry["data"][::2]

    edit_tensors(tied / SINGLE, edit)
    refused(tied, SINGLE, name, dtype, **TERNARY)


@pytest.mark.parametrize("name", [EMBED, Q0, "model.layers.1.self_attn.k_norm.weight"])
def test_values_that_are_not_finite(tied, name):
    def edit(tensors):
        tensors[name]["data"] = tensors[name]["data"][:-2] + b"\x80\x7f"

    edit_tensors(tied / SINGLE, edit)
    refused(tied, SINGLE, name, "not finite", **TERNARY)


def test_scales_that_float16_cannot_hold(tied):
    def edit(tensors):
        tensors[Q0]["data"] = b"\x80\x49" * (len(tensors[Q0]["data"]) // 2)  # 2^20

    edit_tensors(tied / SINGLE, edit)
    refused(tied, SINGLE, Q0, "too large for float16", **TERNARY)


def test_missing_and_extra_tensors(tied):
    edit_tensors(tied / SINGLE, lambda tensors: tensors.pop(EMBED))
    refused(tied, f"lacks tensor {EMBED}", **TERNARY)


def test_extra_tensors(tied):
    def edit(tensors):
        tensors["model.layers.0.self_attn.q_proj.biases"] = tensors["model.norm.weight"]

    edit_tensors(tied / SINGLE, edit)
    refused(tied, SINGLE, "q_proj.biases", "no place for", **TERNARY)


@pytest.mark.parametrize("shape", [[61 * 128], [61, 2, 64], [0, 128]])
def test_an_embedding_that_is_no_table(tied, shape):
    def edit(tensors):
        tensors[EMBED]["shape"] = shape
        if 0 in shape:
            tensors[EMBED]["data"] = b""

    edit_tensors(tied / SINGLE, edit)
    refused(tied, "vocab_size is 0" if 0 in shape else EMBED, **TERNARY)


def test_a_vocabulary_smaller_than_the_tokenizer(tied):
    """config.json says more rows than the tensor has: the tensor's count."""
    edit_json(tied / "config.json", lambda config: config.update(vocab_size=70))
    words = {f"w{i}": i for i in range(65)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.save(str(tied / "tokenizer.json"))
    refused(tied, "tokenizer.json", "id 64", "61 rows", **TERNARY)


@pytest.mark.parametrize("options", [None, {}, {"add_bos_token": False}])
def test_a_prompt_begins_without_the_bos_that_config_json_names(tied, options):
    edit_json(tied / "config.json", lambda config: config.update(bos_token_id=3))
    words = {f"w{i}": i for i in range(61)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(tied / "tokenizer.json"))
    if options is not None:
        edit_json(tied / "tokenizer_config.json", lambda values: values.update(options))
    assert not open_checkpoint(tied, **TERNARY).add_bos


@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_random_damage_to_any_file_never_escapes(untied, count):
    """Opens and reads, or is refused in one sentence, whatever bytes are wrong and wherever."""
    files = sorted(path for path in untied.iterdir() if path.is_file())
    whole = {path: path.read_bytes() for path in files}
    random, outcomes = Random(0), set()
    for _ in range(count):
        path = random.choice(files)
        damaged = bytearray(whole[path])
        # The header of a safetensors file: behind it a wrong byte is only another weight.
        end = 8 + int.from_bytes(damaged[:8], "little") if path.suffix == ".safetensors" else None
        for _ in range(random.choice([1, 1, 4])):
            damaged[random.randrange(end or len(damaged))] = random.randrange(256)
        if random.random() < 0.1:
            del damaged[random.randrange(len(damaged)) :]
        path.write_bytes(damaged)
        try:
            read_all(untied, **BINARY)
            outcomes.add("opened")
        except BitMTPError as fault:
            assert "\n" not in str(fault)
            outcomes.add("refused")
        path.write_bytes(whole[path])
    assert outcomes == {"opened", "refused"}


def test_large_tensors_are_read_in_blocks(written, monkeypatch):
    """No matrix is in memory as float32 as a whole."""
    from bitmtp_tvm.checkpoint import hf_weights

    monkeypatch.setattr(hf_weights, "_ROWS_AT_ONCE", 7)
    read = []
    original = SafetensorsFile.read_rows

    def counting(self, name, start, stop):
        read.append((start, stop))
        return original(self, name, start, stop)

    checkpoint = open_checkpoint(written["latent-tied"][0], **TERNARY)
    whole = open_checkpoint(written["latent-tied"][0], **TERNARY).low_bit("embed")
    monkeypatch.setattr(SafetensorsFile, "read_rows", counting)
    for part, wanted in zip(checkpoint.low_bit("embed"), whole, strict=True):
        np.testing.assert_array_equal(part, wanted)
    assert read == [(i, min(i + 7, 61)) for i in range(0, 61, 7)]
