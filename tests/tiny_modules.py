"""Scheduled and lowered modules of a few lines, for the tests of the toolchain."""

from typing import Any


def lowered(module: Any) -> Any:
    """Relax calls become calls of the virtual machine; nothing is scheduled."""
    from tvm import relax

    return relax.get_pipeline("default_build")(module)


def cpu_module() -> Any:
    """`main(x (16,) float32)` = exp(x), rounded through float16: calls libm, and a conversion."""
    from tvm.script import ir as I
    from tvm.script import relax as R
    from tvm.script import tirx as T

    @I.ir_module
    class Module:
        @T.prim_func(private=True, s_tir=True)
        def kernel(x: T.Buffer((16,), "float32"), y: T.Buffer((16,), "float32")):
            T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
            for i in range(16):
                with T.sblock("exp"):
                    v = T.axis.spatial(16, i)
                    y[v] = T.Cast("float32", T.Cast("float16", T.exp(x[v])))

        @R.function
        def main(x: R.Tensor((16,), "float32")) -> R.Tensor((16,), "float32"):
            cls = Module
            with R.dataflow():
                y = R.call_tir(cls.kernel, (x,), out_ty=R.Tensor((16,), "float32"))
                R.output(y)
            return y

    return lowered(Module)


def gpu_module() -> Any:
    """`main(a (32, 4), b (32, 2))` = an mma of packed bytes plus one dp4a: int32 `(32, 4)`."""
    from tvm.script import ir as I
    from tvm.script import relax as R
    from tvm.script import tirx as T

    @I.ir_module
    class Module:
        @T.prim_func(private=True, s_tir=True)
        def kernel(
            a: T.Buffer((32, 4), "uint32"),
            b: T.Buffer((32, 2), "uint32"),
            c: T.Buffer((32, 4), "int32"),
        ):
            T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
            for lane in T.thread_binding(32, thread="threadIdx.x"):
                with T.sblock("mma"):
                    v = T.axis.spatial(32, lane)
                    T.reads(a[v, 0:4], b[v, 0:2])
                    T.writes(c[v, 0:4])
                    d = T.sblock_alloc_buffer((4,), "uint32", scope="local")
                    for i in T.unroll(4):
                        d[i] = T.uint32(0)
                    T.evaluate(
                        T.ptx.mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32(
                            d[0], d[1], d[2], d[3],
                            a[v, 0], a[v, 1], a[v, 2], a[v, 3],
                            b[v, 0], b[v, 1],
                            d[0], d[1], d[2], d[3],
                        )
                    )  # fmt: skip
                    for i in T.unroll(4):
                        c[v, i] = T.call_pure_extern(
                            "int32", "__dp4a", T.reinterpret("int32", a[v, i]), 1, 0
                        ) + T.reinterpret("int32", d[i])

        @R.function
        def main(a: R.Tensor((32, 4), "uint32"), b: R.Tensor((32, 2), "uint32")) -> R.Tensor(
            (32, 4), "int32"
        ):
            cls = Module
            with R.dataflow():
                c = R.call_tir(cls.kernel, (a, b), out_ty=R.Tensor((32, 4), "int32"))
                R.output(c)
            return c

    return lowered(Module)


def broken_module() -> Any:
    """A GPU module that calls a device function nobody defines."""
    from tvm.script import ir as I
    from tvm.script import relax as R
    from tvm.script import tirx as T

    @I.ir_module
    class Module:
        @T.prim_func(private=True, s_tir=True)
        def kernel(a: T.Buffer((32,), "int32"), c: T.Buffer((32,), "int32")):
            T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
            for lane in T.thread_binding(32, thread="threadIdx.x"):
                with T.sblock("call"):
                    v = T.axis.spatial(32, lane)
                    c[v] = T.call_pure_extern("int32", "no_such_function", a[v])

        @R.function
        def main(a: R.Tensor((32,), "int32")) -> R.Tensor((32,), "int32"):
            cls = Module
            with R.dataflow():
                c = R.call_tir(cls.kernel, (a,), out_ty=R.Tensor((32,), "int32"))
                R.output(c)
            return c

    return lowered(Module)
