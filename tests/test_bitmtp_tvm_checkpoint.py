import contextlib
import json
import random
import shutil

import numpy as np
import pytest
import safetensors_bytes
from bitnet_checkpoint import DEMO, ODD, WIDE, write_checkpoint
from checkpoint_edits import edit_json, edit_tensors, read_all, refused
from tokenizers import Tokenizer, models, processors

from bitmtp_tvm.checkpoint import dense_shapes, matrix_shapes, open_checkpoint
from bitmtp_tvm.checkpoint.safetensors_file import SafetensorsFile
from bitmtp_tvm.errors import BitMTPError
from relax_models.formats import bf16_bits, bf16_to_float32

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q0 = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "odd": (root / "odd", write_checkpoint(root / "odd", ODD, seed=1)),
        "wide": (root / "wide", write_checkpoint(root / "wide", WIDE, seed=2, shard_bytes=60_000)),
    }


@pytest.fixture
def odd(written, tmp_path):
    """A single-file checkpoint of its own for each test to damage."""
    shutil.copytree(written["odd"][0], tmp_path / "odd")
    return tmp_path / "odd"


@pytest.fixture
def wide(written, tmp_path):
    """The same in shards."""
    shutil.copytree(written["wide"][0], tmp_path / "wide")
    return tmp_path / "wide"


HF_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "input_norm": "input_layernorm.weight",
    "attn_sub_norm": "self_attn.attn_sub_norm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "ffn_sub_norm": "mlp.ffn_sub_norm.weight",
}


@pytest.mark.parametrize("which", ["odd", "wide"])
def test_every_tensor_is_what_was_written(written, which):
    directory, dequantised = written[which]
    checkpoint = open_checkpoint(directory)
    scales = set()
    for name, shape in matrix_shapes(checkpoint.config).items():
        codes, scale = checkpoint.low_bit(name)
        assert codes.shape == shape and codes.dtype == np.uint8
        layer, matrix = name.removeprefix("layers.").split(".")
        block = "mlp" if matrix.split("_")[0] in ("gate", "up", "down") else "self_attn"
        weight = dequantised.pop(f"model.layers.{layer}.{block}.{matrix}.weight")
        np.testing.assert_array_equal((codes.astype(np.float32) - 1) * np.float32(scale), weight)
        scales.add(scale)
    assert len(scales) == len(matrix_shapes(checkpoint.config))
    for name, shape in dense_shapes(checkpoint.config).items():
        got = checkpoint.dense(name)
        stem, _, last = name.rpartition(".")
        weight = dequantised.pop(f"model.{stem}.{HF_NAMES[last]}" if stem else HF_NAMES[name])
        assert got.shape == shape
        assert got.dtype == (np.uint16 if name == "embed" else np.float32)
        np.testing.assert_array_equal(bf16_to_float32(got) if name == "embed" else got, weight)
    assert not dequantised


def test_configuration_is_what_transformers_wrote(written):
    checkpoint = open_checkpoint(written["wide"][0])
    assert {key: getattr(checkpoint.config, key) for key in WIDE} == WIDE
    assert checkpoint.config.rope_theta == 500000.0
    assert checkpoint.name == "wide"
    assert (checkpoint.bos_token_id, checkpoint.eos_token_ids) == (1, (2,))
    assert checkpoint.tokenizer is None and not checkpoint.add_bos


def test_demo():
    checkpoint = read_all(DEMO)
    assert checkpoint.name == "demo"
    assert checkpoint.tokenizer == DEMO / "tokenizer.json"
    assert checkpoint.add_bos
    assert (checkpoint.bos_token_id, checkpoint.eos_token_ids) == (0, (1,))
    mtp = checkpoint.config.mtp
    assert (mtp.block_size, mtp.mask_token_id, mtp.block_attention) == (8, 2, "causal")


def test_names_that_no_tensor_has(written):
    checkpoint = open_checkpoint(written["odd"][0])
    for read in (checkpoint.low_bit, checkpoint.dense):
        for name in ("layers.0.none", "layers.9.input_norm", "lm_head"):
            with pytest.raises(KeyError):
                read(name)


def test_worked_example_of_the_packed_file(odd):
    """Codes 0 1 2 0 1 1 2 0 of eight rows, as the docstring of the loader shows them."""

    def change(tensors):
        rows, columns = tensors[Q0]["shape"]
        packed = np.frombuffer(tensors[Q0]["data"], np.uint8).reshape(rows, columns).copy()
        packed[:2, 0] = [0x98, 0x11]
        tensors[Q0]["data"] = packed.tobytes()

    edit_tensors(odd / SINGLE, change)
    codes, _ = open_checkpoint(odd).low_bit("layers.0.q_proj")
    quarter = ODD["hidden_size"] // 4
    eight = [codes[i * quarter + r, 0] for i in range(4) for r in range(2)]
    assert eight == [0, 1, 2, 0, 1, 1, 2, 0]


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_other_float_types_are_read(odd, written, dtype):
    def change(tensors):
        for entry in tensors.values():
            if entry["dtype"] == "BF16":
                values = bf16_to_float32(np.frombuffer(entry["data"], np.uint16))
                numpy_name = {"F32": np.float32, "F16": np.float16}[dtype]
                entry |= {"dtype": dtype, "data": values.astype(numpy_name).tobytes()}

    edit_tensors(odd / SINGLE, change)
    ours, plain = open_checkpoint(odd), open_checkpoint(written["odd"][0])
    for name in dense_shapes(ours.config):
        wanted = plain.dense(name)
        if dtype == "F16" and name == "embed":
            # Small values lose bits in float16; what is left is then rounded once.
            wanted = bf16_bits(bf16_to_float32(wanted).astype(np.float16).astype(np.float32))
        np.testing.assert_array_equal(ours.dense(name), wanted)


def test_class_name_in_the_other_spelling(odd):
    edit_json(odd / "config.json", lambda c: c.update(architectures=["BitnetForCausalLM"]))
    read_all(odd)


def test_older_configuration_keys(odd):
    def change(config):
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        config["torch_dtype"] = config.pop("dtype")
        config["rope_scaling"] = None
        del config["head_dim"]

    edit_json(odd / "config.json", change)
    assert read_all(odd).config.head_dim == 12


# ---- what config.json may not say


CONFIG_FAULTS = [
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
    ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
    ({"architectures": None}, "architectures"),
    ({"model_type": "llama"}, "model_type is 'llama'"),
    ({"attention_bias": True}, "attention_bias is True"),
    ({"sliding_window": 128}, "sliding_window is 128"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_parameters"),
    ({"rope_parameters": "default"}, "rope_parameters"),
    ({"rope_parameters": None}, "lacks rope_theta"),
    ({"rope_parameters": {"rope_type": ["default"], "rope_theta": 1e4}}, "rope_parameters"),
    ({"rope_theta": 10000.0}, "rope_theta differs"),
    ({"vocab_size": -61}, "vocab_size is -61"),
    ({"hidden_size": "72"}, "hidden_size is '72'"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads 0"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ({"num_hidden_layers": 1}, "layers.1."),
    ({"num_hidden_layers": 3}, "lacks tensor model.layers.2."),
    ({"num_key_value_heads": 4}, "num_key_value_heads"),
    ({"intermediate_size": 101}, "101 rows"),
    ({"intermediate_size": 104}, "shape"),
    ({"head_dim": 16}, "shape"),
    ({"rms_norm_eps": None}, "rms_norm_eps is None"),
    ({"eos_token_id": 61}, "eos_token_id is 61"),
    ({"eos_token_id": [2, -1]}, "eos_token_id is -1"),
    ({"bos_token_id": 1000}, "bos_token_id is 1000"),
    ({"bos_token_id": "1"}, "bos_token_id is '1'"),
    ({"mtp": {"block_size": 8, "mask_token_id": 61}}, "mtp.mask_token_id is 61"),
    ({"mtp": {"block_size": 8, "mask_token_id": 3, "label": "same"}}, "mtp.label"),
    ({"quantization_config": None}, "quantization_config is None"),
]


@pytest.mark.parametrize(("change", "part"), CONFIG_FAULTS)
def test_configuration_faults(odd, change, part):
    edit_json(odd / "config.json", lambda config: config.update(change))
    refused(odd, str(odd), part)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
        ({"linear_class": "bitlinear", "quantization_mode": "online"}, "'online'; only 'offline'"),
        ({"linear_class": None}, "linear_class is None"),
        ({"quantization_mode": "online"}, "quantization_mode is 'online'"),
        ({"use_rms_norm": True}, "use_rms_norm"),
        ({"modules_to_not_convert": ["model.layers.0.mlp"]}, "modules_to_not_convert"),
    ],
)
def test_quantisation_faults(odd, change, part):
    def edit(config):
        config["quantization_config"].update(change)

    edit_json(odd / "config.json", edit)
    refused(odd, "config.json", part)


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "num_attention_heads",
        "hidden_act",
        "tie_word_embeddings",
        "rms_norm_eps",
        "max_position_embeddings",
    ],
)
def test_missing_configuration_keys(odd, key):
    edit_json(odd / "config.json", lambda config: config.pop(key))
    refused(odd, "config.json", f"lacks {key}")


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"\xff\xfe{}", b"[" * 100_000, b'{"a": 1, "a": 2}', b"NaN"],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_files_that_are_no_json_object(odd, name, text):
    (odd / name).write_bytes(text)
    refused(odd, name, "JSON")


def test_no_value_of_any_key_escapes(odd):
    """Opens, or is refused in one sentence, whatever stands in config.json."""
    path = odd / "config.json"
    config = json.loads(path.read_text())
    config |= {"rope_scaling": None, "mtp": {"block_size": 8, "mask_token_id": 3}}
    strange = [None, True, -1, 0, 1, 2.5, 1 << 80, float("nan"), "x", [], [{}], {}, {"a": [0]}]
    for key in config:
        for value in strange:
            path.write_text(json.dumps(config | {key: value}))
            with contextlib.suppress(BitMTPError):
                read_all(odd)


# ---- what the directory may not hold


def test_places_that_are_no_checkpoint(tmp_path):
    file = tmp_path / "model.bin"
    file.write_bytes(b"PK")
    refused(file, "model.bin", "is a file")
    refused(tmp_path / "none", "none", "does not exist")
    refused(tmp_path, "config.json")


def test_no_tensors(odd):
    (odd / SINGLE).unlink()
    refused(odd, SINGLE, INDEX)


def test_single_file_and_shards_at_once(wide):
    shutil.copy(wide / "model-00001-of-00003.safetensors", wide / SINGLE)
    refused(wide, SINGLE, INDEX)


def test_missing_tensor(odd):
    edit_tensors(odd / SINGLE, lambda tensors: tensors.pop(f"{Q0}_scale"))
    refused(odd, str(odd), f"lacks tensor {Q0}_scale")


def test_extra_tensor(odd):
    def change(tensors):
        tensors["model.layers.0.self_attn.q_proj.bias"] = tensors[f"{Q0}_scale"]

    edit_tensors(odd / SINGLE, change)
    refused(odd, SINGLE, "model.layers.0.self_attn.q_proj.bias")


@pytest.mark.parametrize("name", [Q0, f"{Q0}_scale", "model.norm.weight"])
def test_wrong_shape(odd, name):
    def change(tensors):
        tensors[name]["shape"] = [1, *tensors[name]["shape"]]

    edit_tensors(odd / SINGLE, change)
    refused(odd, SINGLE, name, "shape")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(Q0, "I8"), (f"{Q0}_scale", "I16"), ("model.embed_tokens.weight", "U16"), (Q0, "F4")],
)
def test_wrong_element_type(odd, name, dtype):
    edit_tensors(odd / SINGLE, lambda tensors: tensors[name].update(dtype=dtype))
    refused(odd, SINGLE, name, dtype)


def test_code_three(odd):
    def change(tensors):
        tensors[Q0]["data"] = b"\xc0" + tensors[Q0]["data"][1:]

    edit_tensors(odd / SINGLE, change)
    refused(odd, SINGLE, Q0, "code 3")


@pytest.mark.parametrize("bits", [0x7F80, 0x7FC0, 0xFF80])
@pytest.mark.parametrize("name", [f"{Q0}_scale", "model.norm.weight", "model.embed_tokens.weight"])
def test_values_that_are_not_finite(odd, name, bits):
    def change(tensors):
        tensors[name]["data"] = bits.to_bytes(2, "little") + tensors[name]["data"][2:]

    edit_tensors(odd / SINGLE, change)
    refused(odd, SINGLE, name, "not finite")


@pytest.mark.parametrize("bits", [0x0000, 0xBF80])
def test_scales_that_are_not_positive(odd, bits):
    def change(tensors):
        tensors[f"{Q0}_scale"]["data"] = bits.to_bytes(2, "little")

    edit_tensors(odd / SINGLE, change)
    refused(odd, SINGLE, f"{Q0}_scale", "positive")


def test_rows_that_are_no_multiple_of_four(odd):
    edit_json(odd / "config.json", lambda config: config.update(head_dim=2, num_key_value_heads=1))
    refused(odd, "model.layers.0.self_attn.k_proj", "2 rows")


# ---- shards


def move(wide, change):
    edit_json(wide / INDEX, lambda index: change(index["weight_map"]))


def test_index_names_a_file_that_is_missing(wide):
    (wide / "model-00002-of-00003.safetensors").unlink()
    refused(wide, INDEX, "model-00002-of-00003.safetensors")


def test_index_names_a_tensor_that_its_file_lacks(wide):
    move(wide, lambda places: places.update({"model.extra": "model-00001-of-00003.safetensors"}))
    refused(wide, "model-00001-of-00003.safetensors", "model.extra", INDEX)


def test_index_puts_a_tensor_into_the_wrong_file(wide):
    def change(places):
        others = sorted(set(places.values()) - {places[Q0]})
        places[Q0] = others[0]

    move(wide, change)
    refused(wide, Q0, INDEX)


def test_index_does_not_know_a_tensor(wide):
    move(wide, lambda places: places.pop(Q0))
    refused(wide, Q0, INDEX)


def test_tensor_in_two_shards(wide):
    places = json.loads((wide / INDEX).read_text())["weight_map"]
    tensor = safetensors_bytes.load(wide / places[Q0])[Q0]
    other = next(place for place in places.values() if place != places[Q0])
    edit_tensors(wide / other, lambda tensors: tensors.update({Q0: tensor}))
    refused(wide, Q0, other)


@pytest.mark.parametrize("place", ["../odd/model.safetensors", "/etc/hosts", "..", "", 3, None])
def test_index_that_leaves_the_directory(wide, place):
    move(wide, lambda places: places.update({Q0: place}))
    refused(wide, INDEX, Q0)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_damaged_index(wide, text):
    (wide / INDEX).write_text(text)
    refused(wide, str(wide))


# ---- damaged safetensors files


def test_truncation_anywhere(odd):
    path = odd / SINGLE
    whole = path.read_bytes()
    data_start = 8 + int.from_bytes(whole[:8], "little")
    sizes = {0, 1, 7, 8, 9, data_start - 1, data_start, data_start + 1, len(whole) - 1}
    for size in sorted(sizes | set(range(0, len(whole), 997))):
        path.write_bytes(whole[:size])
        refused(odd, SINGLE, "truncated")


def test_bytes_behind_the_last_tensor(odd):
    with (odd / SINGLE).open("ab") as file:
        file.write(b"abc")
    refused(odd, SINGLE, "3 bytes")


def test_file_that_shrinks_after_it_was_opened(odd):
    checkpoint = open_checkpoint(odd)
    (odd / SINGLE).write_bytes((odd / SINGLE).read_bytes()[:5000])
    with pytest.raises(BitMTPError, match="became shorter"):
        for name in dense_shapes(checkpoint.config):
            checkpoint.dense(name)


def test_random_damage_to_the_header_never_escapes(odd):
    """Opens, or is refused: no other exception, whatever byte is wrong."""
    path = odd / SINGLE
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    generator = random.Random(0)
    outcomes = set()
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(generator.choice([1, 1, 4])):
            damaged[generator.randrange(header)] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            open_checkpoint(odd)
            outcomes.add("opened")
        except BitMTPError as fault:
            assert "\n" not in str(fault)
            outcomes.add("refused")
    assert "refused" in outcomes


HEADERS = [
    (b'{"a": 1}', "tensor a"),
    (b'{"a": {}}', "tensor a"),
    (b'{"a": {"dtype": ["U8"], "shape": [4], "data_offsets": [0, 4]}}', "element type"),
    (b'{"a": {"dtype": "U8", "shape": [-4], "data_offsets": [0, 4]}}', "shape"),
    (b'{"a": {"dtype": "U8", "shape": [true], "data_offsets": [0, 4]}}', "shape"),
    (b'{"a": {"dtype": "U8", "shape": 4, "data_offsets": [0, 4]}}', "shape"),
    (b'{"a": {"dtype": "U8", "shape": [4], "data_offsets": [4]}}', "data_offsets"),
    (b'{"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 0]}}', "data_offsets"),
    (b'{"a": {"dtype": "U8", "shape": [4], "data_offsets": [-4, 0]}}', "data_offsets"),
    (b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 4]}}', "16 bytes"),
    (
        b'{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},'
        b' "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}}',
        "tensor b begins",
    ),
    (
        b'{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},'
        b' "a": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}}',
        "'a' stands twice",
    ),
    (b"[]", "JSON object"),
    (b"not json", "not valid JSON"),
]


@pytest.mark.parametrize(("header", "part"), HEADERS)
def test_impossible_headers(tmp_path, header, part):
    path = tmp_path / SINGLE
    safetensors_bytes.save_header(path, header, b"\0" * 6)
    with pytest.raises(BitMTPError, match=part) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)


def test_files_of_another_kind(tmp_path):
    path = tmp_path / SINGLE
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(BitMTPError, match="Git LFS pointer"):
        SafetensorsFile(path)
    path.write_bytes(b"\x80\x02}q\x00X" * 100)
    with pytest.raises(BitMTPError, match="not a safetensors file"):
        SafetensorsFile(path)
    with pytest.raises(BitMTPError, match="cannot be read"):
        SafetensorsFile(tmp_path)


# ---- tokenizers and special ids


def give_tokenizer(directory, extra=(), adds=None, options=None):
    """A word tokenizer with ids 0.. for <pad> <s> </s> <end> a b, then `extra`."""
    words = ["<pad>", "<s>", "</s>", "<end>", "a", "b", *extra]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="a"))
    if adds is not None:
        named = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
        tokenizer.post_processor = processors.TemplateProcessing(adds, None, named)
    tokenizer.save(str(directory / "tokenizer.json"))
    if options is not None:
        edit_json(directory / "tokenizer_config.json", lambda values: values.update(options))


@pytest.mark.parametrize(
    ("adds", "options", "add_bos"),
    [
        (None, None, True),
        ("<s> $A", None, True),
        ("<s> $A", {}, True),
        (None, {}, False),
        (None, {"add_bos_token": True}, True),
        (None, {"add_bos_token": False}, False),
        ("<s> $A", {"add_bos_token": False}, False),
    ],
)
def test_what_a_prompt_begins_with(odd, adds, options, add_bos):
    give_tokenizer(odd, adds=adds, options=options)
    checkpoint = open_checkpoint(odd)
    assert checkpoint.add_bos is add_bos
    assert checkpoint.tokenizer == odd / "tokenizer.json"


def test_no_bos_anywhere(odd):
    for name in ("config.json", "generation_config.json"):
        edit_json(odd / name, lambda values: values.update(bos_token_id=None))
    give_tokenizer(odd)
    assert not open_checkpoint(odd).add_bos
    give_tokenizer(odd, options={"add_bos_token": True})
    refused(odd, "add_bos_token", "bos_token_id")


def test_post_processor_that_adds_something_else(odd):
    give_tokenizer(odd, adds="<s> $A </s>")
    refused(odd, "tokenizer.json", "[1, 2]")


def test_end_tokens_of_all_files(odd):
    generation = odd / "generation_config.json"
    edit_json(generation, lambda values: values.update(eos_token_id=[2, 4]))
    give_tokenizer(odd, options={"eos_token": {"content": "<end>"}})
    assert open_checkpoint(odd).eos_token_ids == (2, 4, 3)


def test_end_token_that_the_tokenizer_lacks(odd):
    give_tokenizer(odd, options={"eos_token": "<|eot|>"})
    refused(odd, "tokenizer_config.json", "<|eot|>")


def test_generation_config_ids(odd):
    edit_json(odd / "generation_config.json", lambda values: values.update(eos_token_id=61))
    refused(odd, "generation_config.json", "eos_token_id is 61")


def test_tokenizer_with_more_ids_than_the_model_has_rows(odd):
    give_tokenizer(odd, extra=[f"w{i}" for i in range(60)])
    refused(odd, "tokenizer.json", "'w59'", "id 65")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": {"type": "Odd"}}'])
def test_damaged_tokenizer(odd, text):
    (odd / "tokenizer.json").write_text(text)
    refused(odd, "tokenizer.json")


def test_nothing_is_read_before_it_is_asked_for(written, monkeypatch):
    """The loader holds no tensor: a model larger than memory can be packed."""
    read = []
    original = SafetensorsFile.read

    def counting(self, name):
        read.append(name)
        return original(self, name)

    monkeypatch.setattr(SafetensorsFile, "read", counting)
    checkpoint = open_checkpoint(written["odd"][0])
    assert not read
    checkpoint.low_bit("layers.0.q_proj")
    assert read == [Q0, f"{Q0}_scale"]
