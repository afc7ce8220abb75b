"""The numbered passes: dumps, the kernels' records, the workspace, and what no rule serves."""

import pytest
import tvm
from test_bitmtp_tvm_specialize import model

from bitmtp_tvm import pipeline
from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.specialize import buckets
from bitmtp_tvm.targets import get_target, tvm_target
from schedules import rule

CPU = tvm_target(get_target("cpu"))


def test_every_kernel_is_scheduled_and_on_record():
    lowered = pipeline.lower(model()[0], buckets((1, 2), (4,)), CPU)
    kernels = {
        var.name_hint: func
        for var, func in lowered.mod.functions.items()
        if isinstance(func, tvm.tirx.PrimFunc)
    }
    records = {kernel.name: kernel for kernel in lowered.kernels}
    assert set(records) <= set(kernels)
    for name, kernel in records.items():
        assert kernels[name].attrs["tirx.is_scheduled"]
        assert kernel.provenance in ("rule", "fixed")
        assert kernel.arguments or kernel.provenance == "fixed"
        assert kernel.name.endswith(f"_w{kernel.width}")
    assert {k.format for k in lowered.kernels if k.op == "low_bit_linear"} == {"bitnet-ternary"}


def test_the_workspace_holds_the_blocks_of_the_widest_step():
    """Blocks are whole pages; logits, tokens and activations of a decode step are in them."""
    lowered = pipeline.lower(model()[0], buckets((1, 2), (4,)), CPU)
    assert len(lowered.workspace) >= 5
    assert all(size % pipeline.PAGE == 0 for size in lowered.workspace)
    wide = pipeline.lower(model()[0], buckets((1, 64), (4,)), CPU)
    # 64 rows of 40 float32 logits.
    assert max(wide.workspace) >= 64 * 40 * 4 > max(lowered.workspace)


def test_a_dump_is_written_after_every_pass(tmp_path):
    told = []
    pipeline.lower(model()[0], buckets((1,), (2,)), CPU, tmp_path / "dump", told.append)
    names = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert names == [f"{i:02d}_{name}.py" for i, name in enumerate(told, start=1)]
    assert told[:4] == ["specialize", "fuse", "decode_loop", "schedule"]
    assert "decode_w1" in (tmp_path / "dump" / names[-1]).read_text()


def test_an_operation_without_a_rule_is_an_error(monkeypatch):
    rules = dict(rule.RULES["llvm"])
    del rules["greedy"]
    monkeypatch.setitem(rule.RULES, "llvm", rules)
    with pytest.raises(BitMTPError, match=r"no schedule for greedy .* on llvm"):
        pipeline.lower(model()[0], buckets((1,), (2,)), CPU)
