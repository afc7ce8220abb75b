"""The decode loop of models that are compiled for the processor."""

import pytest
from bitnet_checkpoint import DEMO, ODD, write_checkpoint
from checkpoint_edits import edit_json
from loop_properties import LIMIT, PROMPTS, PYTHON, WIDTHS, LoopProperties, Model
from qwen3_checkpoint import TIED, write_qwen3

from bitmtp_tvm.compile import CompileOptions, compile_model

# The demo has settings of its own.
MTP = {
    "bidirectional": {"block_size": 4, "mask_token_id": 2, "block_attention": "bidirectional"},
    "groups": {"block_size": 3, "mask_token_id": 60, "block_attention": "causal"},
}


def write_model(name, folder):
    """A random checkpoint with MTP settings; its folder, and the rule that makes it low-bit."""
    if name == "groups":
        write_qwen3(folder, TIED, bits=2)
    else:
        write_checkpoint(folder, ODD)
    settings = MTP[name] | {"label": "next"}
    edit_json(folder / "config.json", lambda config: config.update(mtp=settings))
    return folder, "ternary-g128" if name == "groups" else None


@pytest.fixture(scope="module", params=["demo", *MTP])
def model(request, tmp_path_factory):
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    path, quant = (DEMO, None) if name == "demo" else write_model(name, folder / "checkpoint")
    options = CompileOptions(
        "cpu",
        str(path),
        quant=quant,
        context=LIMIT,
        widths=WIDTHS,
        output=folder / "artifact",
    )
    compile_model(options)
    return Model(folder / "artifact", [*PROMPTS, PYTHON] if name == "demo" else PROMPTS)


class TestLoop(LoopProperties):
    pass
