"""Attention of a decode step that turns its queries and writes its cache, norms first or not.

The blocks of schedules/gpu/attention_split.py, and one kernel less in front of them.
"""

from tvm import tirx
from tvm.script import tirx as T

from schedules.gpu import attention_split
from schedules.gpu.attention_fragments import SLOTS, THREADS, Sizes
from schedules.gpu.attention_rope import Step, from_qkv
from schedules.gpu.attention_split import Grid, SplitTile, one_part_of
from schedules.gpu.attention_warp import MASK_WORDS, plan_of
from schedules.gpu.heads import Heads
from schedules.space import Template
from schedules.workload import Workload


def _attention(work: Workload) -> Workload:
    """The `attention_parts` that is within a workload."""
    cache, visible, tops, norms, mixed = work.shapes[-5:]
    width, heads, _, head_dim = mixed
    shapes = ((width, heads, head_dim), cache, (1,), visible, tops, norms, mixed)
    return Workload("attention_parts", work.settings, shapes, ())


def _make(work: Workload, tile: SplitTile) -> tirx.PrimFunc:
    inner, eps = _attention(work), work.settings.get("eps")
    q_shape, cache_shape = inner.shapes[:2]
    plan = plan_of(inner, tile, work.settings["chains"], SLOTS)
    sizes, grid = Sizes(plan.head_dim, tile.tiles), Grid.of(plan, cache_shape[1])
    heads = Heads(plan.width, q_shape[1], cache_shape[1], plan.head_dim)
    one_part = one_part_of(plan, sizes, from_qkv(plan, sizes, heads, eps))
    all_parts = _all_parts(work, grid, one_part)
    return (_plain if eps is None else _normed)(work, grid, all_parts)


def _plain(work: Workload, grid: Grid, all_parts) -> tirx.PrimFunc:
    """See `relax_models.fused_ops.rope_attention_parts`."""
    qkv_shape, (width,), _, table_shape, cache_shape, _, tops_shape, _, mixed_shape = work.shapes

    @T.prim_func(private=True, s_tir=True)
    def func(
        qkv: T.Buffer(qkv_shape, "float32"),
        position: T.Buffer((width,), "int32"),
        boundary: T.Buffer((1,), "int32"),
        table: T.Buffer(table_shape, "float32"),
        cache: T.Buffer(cache_shape, "float16"),
        visible: T.Buffer((width, MASK_WORDS), "uint32"),
        tops: T.Buffer(tops_shape, "float32"),
        norms: T.Buffer(tops_shape, "float32"),
        mixed: T.Buffer(mixed_shape, "float32"),
    ):
        for bx in T.thread_binding(grid.size, thread="blockIdx.x"):
            for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                with T.sblock("attention"):
                    block = T.axis.spatial(grid.size, bx)
                    thread = T.axis.spatial(THREADS, tx)
                    all_parts(
                        Step(qkv, None, position, table, cache, grid.first(block) == 0),
                        boundary,
                        visible,
                        (tops, norms, mixed),
                        block,
                        thread,
                    )

    return func


def _normed(work: Workload, grid: Grid, all_parts) -> tirx.PrimFunc:
    """See `relax_models.fused_ops.norm_rope_attention_parts`."""
    qkv_shape, (size,), _, (width,), _, table_shape, cache_shape, _, tops_shape, _, mixed_shape = (
        work.shapes
    )

    @T.prim_func(private=True, s_tir=True)
    def func(
        qkv: T.Buffer(qkv_shape, "float32"),
        q_norm: T.Buffer((size,), "float32"),
        k_norm: T.Buffer((size,), "float32"),
        position: T.Buffer((width,), "int32"),
        boundary: T.Buffer((1,), "int32"),
        table: T.Buffer(table_shape, "float32"),
        cache: T.Buffer(cache_shape, "float16"),
        visible: T.Buffer((width, MASK_WORDS), "uint32"),
        tops: T.Buffer(tops_shape, "float32"),
        norms: T.Buffer(tops_shape, "float32"),
        mixed: T.Buffer(mixed_shape, "float32"),
    ):
        for bx in T.thread_binding(grid.size, thread="blockIdx.x"):
            for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                with T.sblock("attention"):
                    block = T.axis.spatial(grid.size, bx)
                    thread = T.axis.spatial(THREADS, tx)
                    all_parts(
                        Step(
                            qkv,
                            (q_norm, k_norm),
                            position,
                            table,
                            cache,
                            grid.first(block) == 0,
                        ),
                        boundary,
                        visible,
                        (tops, norms, mixed),
                        block,
                        thread,
                    )

    return func


def _all_parts(work: Workload, grid: Grid, one_part):
    """A macro that goes through a block's chains."""
    (width, columns), (cache_shape, _, tops_shape, _, mixed_shape) = (
        work.shapes[0],
        work.shapes[-5:],
    )

    @T.macro
    def all_parts(step, boundary, visible, results, block, thread):
        tops, norms, mixed = results
        T.reads(
            step.qkv[0:width, 0:columns],
            step.position[0:width],
            boundary[0],
            step.table[0 : step.table.shape[0], 0 : step.table.shape[1], 0:2],
            visible[0:width, 0:MASK_WORDS],
        )
        T.writes(
            step.cache[0:2, 0 : cache_shape[1], 0 : cache_shape[2], 0 : cache_shape[3]],
            tops[0:width, 0 : tops_shape[1], 0 : tops_shape[2]],
            norms[0:width, 0 : tops_shape[1], 0 : tops_shape[2]],
            mixed[0:width, 0 : mixed_shape[1], 0 : mixed_shape[2], 0 : mixed_shape[3]],
        )
        known = T.sblock_alloc_buffer((1,), "int32", scope="local")
        known[0] = boundary[0]
        for turn in T.serial(grid.turns):
            one_part(
                step,
                known[0],
                visible,
                results,
                grid.kv(block),
                grid.first(block),
                grid.chain(block, turn),
                thread,
            )

    return all_parts


TEMPLATE = Template(
    name="rope_attention_parts_mma",
    tile=SplitTile,
    serves=lambda work, card: attention_split.TEMPLATE.serves(_attention(work), card),
    choose=lambda work, card: attention_split.choose(_attention(work), card),
    candidates=lambda work, card: attention_split.candidates(_attention(work), card),
    make=lambda work, tile, target: _make(work, tile),
)
