"""A whole artifact of one small kernel, for the tests of the loader."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tiny_modules import cpu_module, gpu_module

from bitmtp_tvm.artifact import LIBRARY, MANIFEST, write_artifact
from bitmtp_tvm.build import LEAST_DRIVERS, build
from bitmtp_tvm.manifest import (
    KernelRecord,
    KVLayout,
    Manifest,
    MemoryPlan,
    Shard,
    TokenizerInfo,
)
from bitmtp_tvm.targets import Target, get_target
from bitmtp_tvm.toolchain import versions

PARAMETERS = {
    "norm.weight": np.arange(8, dtype=np.float32),
    "embed.weight": np.arange(32, dtype=np.uint16).reshape(4, 8),
}


def manifest_for(target: Target, shards: tuple[Shard, ...] = (), **changes: Any) -> Manifest:
    """A manifest that fits `target`, with some fields changed."""
    cuda = target.kind == "cuda"
    manifest = Manifest(
        model="tiny",
        config={"hidden_size": 8, "mtp": None},
        format="bitnet-ternary",
        layout_version=1,
        target=target.name,
        kind=target.kind,
        arch=target.arch,
        host_triple=target.host_triple,
        host_features=target.host_features,
        versions=versions(),
        least_drivers=dict(LEAST_DRIVERS) if cuda else {},
        chunks=(1, 2, 4, 8),
        widths=target.widths,
        prefill=target.prefill,
        context=32,
        slots=48,
        kv=KVLayout("float16", (1, 48, 8)),
        memory=MemoryPlan.of(1 << 20, 2 << 20, 3 << 20),
        shards=shards,
        tokenizer=TokenizerInfo(None, True, 0, (1, 2), None),
        kernels=(KernelRecord("kernel", "exp", "", 0, "rule"),),
        counts={"rule": 1},
    )
    return replace(manifest, **changes)


def write_tiny(directory: Path, name: str, **changes: Any) -> Path:
    """Compile and write an artifact for the target `name`."""
    target = get_target(name)
    with write_artifact(directory) as folder:
        path = folder / "params-00001.safetensors"
        save_file(PARAMETERS, path)
        contents = path.read_bytes()
        shard = Shard(path.name, len(contents), hashlib.sha256(contents).hexdigest())
        text = manifest_for(target, (shard,), **changes).to_json()
        module = gpu_module() if target.kind == "cuda" else cpu_module()
        build(module, target, folder / LIBRARY, manifest=text)
        (folder / MANIFEST).write_text(text)
    return directory
