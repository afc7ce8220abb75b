import json
from dataclasses import replace

import pytest

from relax_models.config import PRESETS, ModelConfig, MTPConfig

BITNET_2B = PRESETS["bitnet-2b"]
WITH_MTP = replace(BITNET_2B, mtp=MTPConfig(block_size=8, mask_token_id=128002))


@pytest.mark.parametrize("config", [BITNET_2B, WITH_MTP])
def test_json_round_trip(config):
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_widths():
    assert (BITNET_2B.query_width, BITNET_2B.key_value_width) == (2560, 640)


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
        ({"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ({"tie_word_embeddings": False}, "only tied"),
        ({"architecture": "llama"}, "architecture is 'llama'; known: bitnet"),
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
