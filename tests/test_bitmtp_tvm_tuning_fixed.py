"""What is fixed in a chain runs on arguments that a step would give it, replay after replay."""

from dataclasses import replace

import numpy as np
import pytest
import tvm
from cpu_kernels import run
from tuning_folder import task

from bitmtp_tvm.cards import card_of
from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.records import Key
from bitmtp_tvm.specialize import bind_dims
from bitmtp_tvm.targets import get_target
from bitmtp_tvm.timing import HostTimer
from bitmtp_tvm.tuning_bench import Workbench, weights_name
from bitmtp_tvm.tuning_fixed import CANDIDATES, FIXED, LIMIT, fixed_constants, fixed_inputs
from bitmtp_tvm.tuning_inputs import FILL, OPERATIONS
from bitmtp_tvm.tuning_plan import Candidate, Task, TuningPlan
from relax_models import attention_ops, choose_ops, fused_ops, head_ops, ops, step_ops
from relax_models.state import Finish, Word
from schedules import gpu
from schedules.workload import read

ROWS, SIZE, VOCABULARY, SLOTS, GROUP = 4, 256, 1000, 700, 128
HEADS = (2, 1, 16)

FUNCTIONS = {
    "accept": lambda: step_ops.accept(VOCABULARY),
    "attention_join": lambda: attention_ops.attention_join(2, 16),
    "attention_join_quantize": lambda: fused_ops.attention_join_quantize(2, 128, GROUP),
    "choose": lambda: choose_ops.choose(VOCABULARY),
    "embed": lambda: ops.embed(VOCABULARY, SIZE),
    "final_norm": lambda: ops.final_norm(SIZE, 1e-5),
    "final_norm_codes": lambda: head_ops.final_norm_codes(SIZE, 1e-5),
    "gated_norm_quantize": lambda: ops.gated_norm_quantize(SIZE, 1e-5),
    "gated_quantize": lambda: ops.gated_quantize(SIZE, GROUP),
    "head": lambda: ops.head(VOCABULARY, SIZE),
    "head_rescore": lambda: head_ops.head_rescore(VOCABULARY, SIZE, True),
    "low_bit_embed": lambda: ops.low_bit_embed(VOCABULARY, SIZE, "cuda", "ternary-g128"),
    "norm_quantize": lambda: ops.norm_quantize(SIZE, 1e-5),
    "norm_rope_kv_write": lambda: fused_ops.norm_rope_kv_write(*HEADS, 514, SLOTS, 1e-6),
    "qk_norm": lambda: ops.qk_norm(*HEADS, 1e-6),
    "quantize": lambda: ops.quantize(SIZE, GROUP),
    "rope_kv_write": lambda: ops.rope_kv_write(*HEADS, 514, SLOTS),
    "softmax_parts": lambda: choose_ops.softmax_parts(VOCABULARY),
    "step_rows": lambda: step_ops.step_rows(),
}


def made(op):
    """The operation in plain loops, and its task."""
    func = bind_dims(FUNCTIONS[op](), {"width": ROWS, "rows": ROWS})
    work, names = read(func), tuple(param.name for param in func.params)
    assert work.op == op
    key = Key.of(work, card_of(get_target("h200")))
    constants = fixed_constants(op, names)
    fixed = Task(op, key, work.settings, work.shapes, work.dtypes, constants, 0, {})
    return func, replace(fixed, names=names, fixed=True)


def replayed(op):
    """Arguments by name: as they are given, after one replay and after two."""
    func, fixed = made(op)
    given = fixed_inputs(fixed).arguments
    once = run(func, given)
    twice = run(func, once)
    return [dict(zip(fixed.names, values, strict=True)) for values in (given, once, twice)]


def test_every_operation_of_a_step_has_arguments():
    """`greedy` is of a decode whose logits the host asks for."""
    assert FUNCTIONS.keys() == FIXED.keys()
    assert {*FIXED, *OPERATIONS} == {*gpu.TEMPLATES, *gpu.RULES} - {"greedy"}
    with pytest.raises(BitMTPError, match="has no inputs to time it with: add it to FIXED"):
        fixed_constants("another", ())


@pytest.mark.parametrize("op", FIXED)
def test_arguments_fit_and_what_comes_out_is_finite(op):
    _, fixed = made(op)
    given, _, twice = replayed(op)
    for place, name in enumerate(fixed.names):
        assert (given[name].shape, str(given[name].dtype)) == (
            fixed.shapes[place],
            fixed.dtypes[place],
        )
        assert np.isfinite(twice[name]).all()
    assert [fixed.names[i] for i in fixed.constants] == list(FIXED[op])


def test_every_row_of_a_step_is_in_use():
    _, _, rows = replayed("step_rows")
    assert rows["logit_rows"].tolist() == [0, 1, 2, 3] and rows["boundary"].tolist() == [FILL]
    assert rows["position"].tolist() == [FILL, FILL + 1, FILL + 2, FILL + 3]


def test_a_sequence_grows_by_a_token_a_replay_and_does_not_end():
    given, once, twice = (values["state"] for values in replayed("accept"))
    lengths = [int(state[Word.LENGTH]) for state in (given, once, twice)]
    assert lengths == [FILL + 1, FILL + 2, FILL + 3] and twice[Word.LIMIT] == LIMIT
    assert twice[Word.FINISH] == Finish.RUNNING and twice[Word.IDLE] == 0


def test_a_row_says_a_token_every_time():
    _, _, twice = replayed("choose")
    assert (twice["token"] >= 0).all() and (twice["confidence"] > 0).all()


def test_candidates_are_computed_again_and_stay_candidates():
    given, once, twice = (values["logits"] for values in replayed("head_rescore"))
    assert ((given != once).sum(axis=1) == CANDIDATES).all()
    assert np.array_equal(once, twice) and ((once > 1).sum(axis=1) == CANDIDATES).all()


@pytest.mark.parametrize("op", ["rope_kv_write", "norm_rope_kv_write"])
def test_keys_and_values_go_behind_what_is_filled(op):
    """The rotary table ends within the rows here, and the cache does not."""
    given, once, _ = replayed(op)
    changed = np.flatnonzero((given["cache"] != once["cache"]).any(axis=(0, 1, 3)))
    assert changed.tolist() == [FILL, FILL + 1, FILL + 2, FILL + 3]
    assert given["position"].tolist() == [512, 513, 513, 513]


def test_a_short_cache_is_filled_to_its_end():
    _, fixed = made("rope_kv_write")
    place = fixed.names.index("cache")
    shapes = [*fixed.shapes]
    shapes[place] = (2, 1, 100, 16)
    arguments = fixed_inputs(replace(fixed, shapes=tuple(shapes))).arguments
    assert arguments[fixed.names.index("boundary")].tolist() == [100 - ROWS]


def attending(written):
    """A task of attention over the cache that the task `written` writes into."""
    key = replace(written.key, op="attention_parts")
    parts = ((ROWS, 2, 32), (ROWS, 2, 32), (ROWS, 2, 32, 16))
    return replace(
        written,
        name="attention",
        key=key,
        settings={"chains": 32, "chain_slots": 64},
        shapes=((ROWS, 2, 16), (2, 1, SLOTS, 16), (1,), (ROWS, 2), *parts),
        dtypes=("float32", "float16", "int32", "uint32", *("float32",) * 3),
        names=("q", "cache", "boundary", "visible", "tops", "norms", "mixed"),
        constants=(1,),
        fixed=False,
    )


def test_attention_is_compared_on_the_cache_as_it_was(tmp_path):
    """The kernel in front writes into it, alone and in the chain."""
    _, rope = made("rope_kv_write")
    tasks = [
        replace(item, counts={"step_w4": 2}, candidates=(Candidate(f"{item.name}_1", "", "", {}),))
        for item in (rope, attending(rope))
    ]
    buckets = {"step_w4": ("rope_kv_write", "attention") * 2}
    plan = TuningPlan("cpu", "tiny", "", {}, "", buckets, tuple(tasks))
    bench = Workbench(plan, tmp_path, tvm.cpu(0), HostTimer(), 1 << 30, 1 << 10)

    def write(qkv, position, boundary, table, cache, q):
        cache.copyfrom(np.full(cache.shape, 9, np.float16))

    def attend(q, cache, boundary, visible, tops, norms, mixed):
        tops.copyfrom(np.full(tops.shape, cache.numpy().astype(np.float64).sum(), np.float32))

    bench._function = lambda task, function: write if task.fixed else attend
    rope, attention = tasks
    bench.is_rule_right(attention)
    assert bench.is_rule_right(rope) and bench.is_same(attention, "attention_1")
    bench.alone(rope, "rope_kv_write_1")
    assert bench.is_same(attention, "attention_1")
    bench.chain("step_w4", {"attention": "attention_1"})
    assert (bench._copies(attention)[1][0].numpy() == 9).all()
    assert bench.is_same(attention, "attention_1")


def test_kernels_of_one_cache_or_table_share_it():
    _, written = made("rope_kv_write")
    assert weights_name(attending(written)) == weights_name(written)
    tables = {weights_name(made(op)[1]) for op in ("embed", "head", "head_rescore")}
    assert len(tables) == 1 and weights_name(task()) not in tables
