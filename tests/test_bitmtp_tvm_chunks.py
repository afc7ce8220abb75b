"""Chunks of steps: on a GPU as replays of one CUDA graph, on a processor with a look between."""

from functools import cache

import pytest
from test_bitmtp_tvm_specialize import TINY
from tvm import relax

from bitmtp_tvm.chunks import CHUNKS, GRAPH_STORAGE, chunk_name
from bitmtp_tvm.pipeline import lower
from bitmtp_tvm.specialize import buckets
from bitmtp_tvm.targets import get_target, tvm_target
from relax_models.bitnet import BitNet
from relax_models.layers import Storage

WIDTHS = (1, 4)
KINDS = {"cpu": "llvm", "h200": "cuda"}


@cache
def functions(target):
    """The Relax functions of a lowered model, by name."""
    storage = Storage(KINDS[target], 48, 32, shared_attention=target != "cpu")
    mod, _ = BitNet(TINY, storage).export()
    lowered = lower(mod, buckets(WIDTHS, (16,)), tvm_target(get_target(target))).mod
    return {
        var.name_hint: func
        for var, func in lowered.functions.items()
        if isinstance(func, relax.Function)
    }


def calls(func, wanted):
    """Names of what a function calls, directly or through the virtual machine, if `wanted`."""
    names = []

    def visit(node):
        if isinstance(node, relax.Call):
            through = getattr(node.args[0], "global_symbol", None) if node.args else None
            own = (getattr(node.op, name, None) for name in ("global_symbol", "name_hint", "name"))
            names.append(str(through or next(filter(None, own), "")))

    relax.analysis.post_order_visit(func, visit)
    return [name for name in names if wanted(name)]


@pytest.mark.parametrize("target", KINDS)
def test_every_bucket_has_a_chunk_of_every_size(target):
    funcs = functions(target)
    first = "step" if target == "cpu" else "graph"
    chunks = {chunk_name(f"{first}_w{w}", count) for w in WIDTHS for count in CHUNKS}
    assert chunks == {name for name in funcs if "_x" in name}
    assert {f"step_w{w}" for w in WIDTHS} <= funcs.keys()


def test_a_chunk_of_a_gpu_replays_the_graph_of_its_bucket():
    funcs = functions("h200")
    for width in WIDTHS:
        for count in CHUNKS:
            func = funcs[chunk_name(f"graph_w{width}", count)]
            assert len(calls(func, lambda name: name.endswith("run_or_capture"))) == count
            # Nothing else is launched, and the host checks no argument again at every replay.
            assert not calls(func, lambda name: "check_tensor_info" in name)
            assert not calls(func, lambda name: "_w" in name and "capture" not in name)
    assert GRAPH_STORAGE in funcs


def test_graphs_share_one_storage_that_is_allocated_once():
    funcs = functions("h200")
    sizes = calls(funcs[GRAPH_STORAGE], lambda name: "alloc_storage" in name)
    assert len(sizes) >= 5
    # The plain functions allocate for themselves, and release it.
    assert calls(funcs["step_w4"], lambda name: "alloc_storage" in name)
    assert not calls(funcs["graph_w4_x1"], lambda name: "alloc_storage" in name)


def test_a_processor_looks_between_two_steps():
    funcs = functions("cpu")
    assert not calls(funcs["step_w4_x1"], lambda name: name.startswith("running"))
    for count in CHUNKS[1:]:
        func = funcs[chunk_name("step_w4", count)]
        half = chunk_name("step_w4", count // 2)
        assert calls(func, lambda name: name.startswith("running")) == ["running_w0"]
        assert calls(func, lambda name, half=half: name == half) == [half, half]
