"""Manifests of whole models, without the models."""

from tiny_artifact import manifest_for

from bitmtp_tvm.manifest import KVLayout, Shard
from bitmtp_tvm.targets import get_target

BITNET_2B = {
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 30,
    "num_attention_heads": 20,
    "num_key_value_heads": 5,
    "head_dim": 128,
    "vocab_size": 128256,
}
DEMO = {
    "hidden_size": 640,
    "intermediate_size": 1792,
    "num_hidden_layers": 12,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8192,
}


def model(target, config=BITNET_2B, weights=1_178_000_000, widths=(1, 2, 4, 8, 16)):
    heads, size = config["num_key_value_heads"], config["head_dim"]
    return manifest_for(
        get_target(target),
        (Shard("params-00001.safetensors", weights, "ff"),),
        config=config,
        context=4096,
        kv=KVLayout("float16", (2, heads, 4224, size)),
        widths=widths,
    )
