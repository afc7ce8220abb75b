import json
from dataclasses import replace

import pytest

from relax_models.config import ARCHITECTURES, PRESETS, ModelConfig, MTPConfig, YarnConfig
from relax_models.formats import FORMATS

BITNET_2B = PRESETS["bitnet-2b"]
WITH_MTP = replace(BITNET_2B, mtp=MTPConfig(block_size=8, mask_token_id=128002))
BONSAI_8B = PRESETS["bonsai-8b"]
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("config", [WITH_MTP, *PRESETS.values()])
def test_json_round_trip(config):
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_widths():
    assert (BITNET_2B.query_width, BITNET_2B.key_value_width) == (2560, 640)
    assert (PRESETS["bonsai-4b"].query_width, PRESETS["bonsai-4b"].key_value_width) == (4096, 1024)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid(name):
    PRESETS[name].validate()


def test_every_format_belongs_to_an_architecture():
    used = {name for entry in ARCHITECTURES.values() for name in entry.weight_formats}
    assert used == set(FORMATS)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"hidden_size": -8}, "hidden_size is -8"),
        ({"hidden_size": 12}, "multiple of 8"),
        ({"intermediate_size": 2.0}, "intermediate_size is 2.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 10**6}, "the limit is 1024"),
        ({"max_position_embeddings": 1 << 40}, "32-bit"),
        ({"head_dim": 3}, "head_dim is 3"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 20"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_theta": "1e4"}, "rope_theta"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; bitnet is only .* 'relu2' or 'silu'"),
        ({"tie_word_embeddings": False}, "only supported with tied"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        ({"architecture": "llama"}, "architecture is 'llama'; known: bitnet, qwen3"),
        ({"architecture": []}, r"architecture is \[\]"),
        ({"architecture": "qwen3"}, "hidden_act is 'relu2'; qwen3"),
        ({"weight_format": "binary-g128"}, "weight_format is 'binary-g128'; bitnet"),
        ({"weight_format": {}}, "weight_format is {}"),
        ({"quantization": None}, "quantization is None"),
        ({"rope_scaling": YARN | {"factor": 0.5}}, r"rope_scaling\.factor is 0\.5"),
        ({"rope_scaling": YARN | {"factor": "4"}}, r"rope_scaling\.factor is '4'"),
        ({"rope_scaling": YARN | {"beta_fast": 0.5}}, r"rope_scaling\.beta_fast is 0\.5"),
        ({"rope_scaling": YARN | {"beta_slow": 0}}, r"rope_scaling\.beta_slow is 0"),
        ({"rope_scaling": YARN | {"attention_factor": 0}}, r"rope_scaling\.attention_factor is 0"),
        (
            {"rope_scaling": YARN | {"original_max_position_embeddings": -1}},
            r"rope_scaling\.original_max_position_embeddings is -1",
        ),
        ({"rope_scaling": {"factor": 4.0}}, "lacks original_max_position_embeddings"),
        ({"rope_scaling": YARN | {"type": "yarn"}}, "rope_scaling has unknown keys: type"),
        ({"mtp": {"block_size": 0, "mask_token_id": 2}}, r"mtp\.block_size is 0"),
        ({"mtp": {"block_size": 8, "mask_token_id": 128256}}, r"mtp\.mask_token_id is 128256"),
        ({"mtp": {"block_size": 8, "mask_token_id": 2, "label": "same"}}, r"mtp\.label"),
        (
            {"mtp": {"block_size": 8, "mask_token_id": 2, "block_attention": "none"}},
            "known: causal, bidirectional",
        ),
        ({"mtp": {"block_size": 8}}, "mtp lacks mask_token_id"),
        ({"mtp": {"block_size": 8, "mask_token_id": 2, "depth": 1}}, "mtp has unknown keys: depth"),
        ({"mtp": 8}, "mtp must be an object"),
        ({"sliding_window": 4}, "unknown keys: sliding_window"),
    ],
)
def test_bad_values_are_one_sentence(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        ModelConfig.from_dict(BITNET_2B.to_dict() | change)


def test_missing_keys_are_named():
    values = BITNET_2B.to_dict()
    del values["head_dim"], values["rope_theta"]
    with pytest.raises(ValueError, match="lacks head_dim, rope_theta"):
        ModelConfig.from_dict(values)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_size": 4104}, "hidden_size is 4104; ternary-g128 needs a multiple of 128"),
        ({"intermediate_size": 100}, "intermediate_size is 100; ternary-g128"),
        ({"head_dim": 34}, r"num_attention_heads \* head_dim is 1088"),
        ({"weight_format": "bitnet-ternary"}, "weight_format is 'bitnet-ternary'; qwen3"),
        ({"weight_format": "int4"}, "weight_format is 'int4'; qwen3 .* 'ternary-g128' or 'binary-"),
        ({"hidden_act": "relu2"}, "hidden_act is 'relu2'; qwen3 is only supported with 'silu'"),
    ],
)
def test_bad_values_of_group_formats(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        ModelConfig.from_dict(BONSAI_8B.to_dict() | change)


def test_yarn_is_read_back_as_yarn():
    config = ModelConfig.from_dict(BONSAI_8B.to_dict() | {"rope_scaling": YARN})
    assert config.rope_scaling == YarnConfig(4.0, 64)


@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize("value", [10**400, 1e31, float("nan")])
def test_numbers_beyond_float32_are_refused_in_one_short_sentence(name, value):
    values = {**PRESETS["bitnet-2b"].to_dict(), name: value}
    with pytest.raises(ValueError, match=f"{name} is .* positive number up to 1e\\+30") as fault:
        ModelConfig.from_dict(values)
    assert len(str(fault.value)) < 150
