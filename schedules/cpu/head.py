"""The 16-bit head and the greedy choice on the processor: a vocabulary row against a few rows."""

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.cpu.vector import from_bf16, group_for, lanes_for, span, splat, tree_sum
from schedules.workload import Workload, is_nan


def head(func: tirx.PrimFunc, work: Workload, target: tvm.target.Target) -> tirx.PrimFunc | None:
    """See `relax_models.ops.head`. Up to four rows share one pass over a row of the table."""
    (rows, size), (vocab_size, _) = work.shapes[:2]
    lanes, group = lanes_for(size), group_for(rows)

    def asks(logit_rows, first):
        wanted = logit_rows[first] >= 0
        for r in range(1, group):
            wanted = T.Or(wanted, logit_rows[first + r] >= 0)
        return wanted

    @T.prim_func(private=True, s_tir=True)
    def func(
        x: T.Buffer((rows, size), "float32"),
        table: T.Buffer((vocab_size, size), "uint16"),
        logit_rows: T.Buffer((rows,), "int32"),
        logits: T.Buffer((rows, vocab_size), "float32"),
    ):
        for v, rg in T.grid(vocab_size, rows // group):
            with T.sblock("token"):
                vv, g = T.axis.remap("SS", [v, rg])
                sums = T.sblock_alloc_buffer((group * lanes,), "float32")
                if asks(logit_rows, g * group):
                    for r in T.unroll(group):
                        sums[span(r * lanes, lanes)] = splat(T.float32(0), lanes)
                    for k in range(size // lanes):
                        for r in T.unroll(group):
                            sums[span(r * lanes, lanes)] = (
                                sums[span(r * lanes, lanes)]
                                + from_bf16(table[vv, span(k * lanes, lanes)], lanes)
                                * x[g * group + r, span(k * lanes, lanes)]
                            )
                    for r in T.unroll(group):
                        logits[g * group + r, vv] = tree_sum(sums, r * lanes, lanes)

    return func


def greedy(func: tirx.PrimFunc, work: Workload, target: tvm.target.Target) -> tirx.PrimFunc | None:
    """See `relax_models.ops.greedy`."""
    rows, vocab_size = work.shapes[0]

    @T.prim_func(private=True, s_tir=True)
    def func(
        logits: T.Buffer((rows, vocab_size), "float32"),
        logit_rows: T.Buffer((rows,), "int32"),
        tokens: T.Buffer((rows,), "int32"),
    ):
        for i in range(rows):
            with T.sblock("row"):
                row = T.axis.spatial(rows, i)
                best = T.sblock_alloc_buffer((1,), "float32")
                token = T.sblock_alloc_buffer((1,), "int32")
                broken = T.sblock_alloc_buffer((1,), "int32")
                best[0] = T.min_value("float32")
                token[0] = -1
                broken[0] = 0
                if logit_rows[row] >= 0:
                    for v in range(vocab_size):
                        if is_nan(logits[row, v]):
                            broken[0] = 1
                        if logits[row, v] > best[0]:
                            best[0] = logits[row, v]
                            token[0] = v
                tokens[row] = T.Select(broken[0] == 1, -1, token[0])

    return func
