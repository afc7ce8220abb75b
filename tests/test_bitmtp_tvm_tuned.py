"""Records applied: the kernels that they change, those that they leave, and records that misfit."""

import json
from dataclasses import replace

import pytest
from cpu_kernels import CPU, run
from test_schedules_cpu import normal, quantized

from bitmtp_tvm.cards import card_of
from bitmtp_tvm.databases import (
    TUNING_RECORDS,
    WORKLOADS,
    read_database,
    recorded_decisions,
    with_record,
)
from bitmtp_tvm.databases import write_database as write
from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.records import DeviceInfo, Key, Record, Records, write_device_info
from bitmtp_tvm.specialize import bind_dims
from bitmtp_tvm.targets import get_target, tvm_target
from bitmtp_tvm.tuned import Origin, Tuned
from relax_models import attention_ops, choose_ops, ops
from relax_models.formats import pack
from schedules import rule, sampled
from schedules.space import choices
from schedules.workload import read

ORIN = get_target("orin")
EPS = 1e-5


def linear(width, n=256):
    return bind_dims(ops.low_bit_linear((n,), 512, "cuda", "bitnet-ternary"), {"width": width})


@pytest.fixture(scope="module")
def record():
    """A choice for four rows that is not the rule's."""
    work, card = read(linear(4)), card_of(ORIN)
    choice = choices(rule.TEMPLATES["cuda"]["low_bit_linear"], work, card)[1]
    key, name = Key.of(work, card), choice.template.name
    return Record(key, name, choice.arguments(), 4e-6, "measured", "orin")


def tuned(folder, target, *records):
    found = Records(folder)
    for one in records:
        found.put([one])
    found.write(folder, None)
    return Tuned.open(folder, target)


def test_a_record_changes_its_own_kernel_and_no_other(tmp_path, record):
    target = tvm_target(ORIN)
    plain, using = Tuned(card=card_of(ORIN)), tuned(tmp_path, ORIN, record)
    before, origin = plain.schedule(linear(4), target)
    assert origin.provenance == "rule"
    assert (origin.template, origin.arguments) != (record.template, record.arguments)
    after, origin = using.schedule(linear(4), target)
    assert origin == Origin("measured", "orin", record.template, record.arguments)
    assert after.script() != before.script()
    for other in (linear(8), linear(4, n=264)):
        kept, origin = using.schedule(other, target)
        assert origin.provenance == "rule"
        assert kept.script() == plain.schedule(other, target)[0].script()


def test_a_record_of_another_device_is_no_measurement(tmp_path, record):
    relative = replace(record, source="h200")
    _, origin = tuned(tmp_path, ORIN, relative).schedule(linear(4), tvm_target(ORIN))
    assert (origin.provenance, origin.source) == ("transferred", "h200")
    learnt = replace(relative, provenance="rule", seconds=None)
    _, origin = tuned(tmp_path, ORIN, learnt).schedule(linear(4), tvm_target(ORIN))
    assert (origin.provenance, origin.source) == ("rule", "h200")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: {"template": "magic"}, "the template magic is none of low_bit_mma"),
        (lambda r: {"arguments": r.arguments | {"warp": 1}}, "warp is a missing or unknown"),
        (lambda r: {"arguments": {}}, "is a missing or unknown argument"),
        (lambda r: {"template": "low_bit_group_gemv"}, "missing or unknown|does not serve it"),
        (lambda r: {"arguments": dict.fromkeys(r.arguments, 0)}, "refuses"),
    ],
)
def test_a_record_that_does_not_fit_is_one_line(tmp_path, record, change, words):
    using = tuned(tmp_path, ORIN, replace(record, **change(record)))
    with pytest.raises(BitMTPError, match=words) as fault:
        using.schedule(linear(4), tvm_target(ORIN))
    assert str(tmp_path) in str(fault.value)
    assert str(fault.value).endswith("tune again")
    assert "\n" not in str(fault.value)


# Schedules made with primitives.


def norm(width=8):
    return bind_dims(ops.norm_quantize(72, EPS), {"width": width})


def operation(func):
    found = rule.operation_of(func, CPU)
    assert found
    return found


@pytest.fixture
def folder(tmp_path):
    """Records of the processor: norm_quantize of eight rows, in portions of two."""
    database = with_record(read_database(tmp_path), operation(norm()), CPU, {"grain": 2}, 3e-6)
    write(tmp_path, database)
    write_device_info(tmp_path, DeviceInfo("cpu", "this one"))
    return tmp_path


def test_a_database_is_replayed(folder, rng):
    using = Tuned.open(folder, get_target("cpu"))
    made, origin = using.schedule(norm(), CPU)
    assert origin == Origin("measured", "cpu", "", {"grain": 2})
    ruled, untouched = using.schedule(norm(4), CPU)
    assert untouched == Origin("rule", "", "", {"grain": 4})
    assert ruled.script() == Tuned().schedule(norm(4), CPU)[0].script()
    before, _ = Tuned().schedule(norm(), CPU)
    assert made.script() != before.script()
    arguments = [normal(rng, 8, 72), normal(rng, 72), *quantized_results(8)]
    for got, want in zip(run(made, arguments), run(before, arguments), strict=True):
        assert got.tobytes() == want.tobytes()


def quantized_results(width):
    import numpy as np

    return [np.zeros((width, 128), np.int8), np.zeros(width, np.float32), np.zeros(width, np.int32)]


def test_a_new_record_takes_the_place_of_the_old(folder):
    database = read_database(folder)
    other = operation(norm(4))
    database = with_record(database, other, CPU, {"grain": 4}, 1e-6)
    # Slower than before, and still what counts: it was measured later.
    database = with_record(database, operation(norm()), CPU, {"grain": 8}, 9e-6)
    write(folder, database)
    assert len(read_database(folder)) == 2
    using = Tuned.open(folder, get_target("cpu"))
    assert using.schedule(norm(), CPU)[1].arguments == {"grain": 8}
    assert using.schedule(norm(4), CPU)[1].arguments == {"grain": 4}


def test_a_database_of_another_device_is_no_measurement(folder):
    write_device_info(folder, DeviceInfo("cpu-aarch64", "a board"))
    _, origin = Tuned.open(folder, get_target("cpu")).schedule(norm(), CPU)
    assert (origin.provenance, origin.source) == ("transferred", "cpu-aarch64")


def test_a_database_without_its_device_is_refused(folder):
    (folder / "device.json").unlink()
    with pytest.raises(BitMTPError, match=r"has no device\.json"):
        Tuned.open(folder, get_target("cpu"))


def first_line(change):
    def damage(path):
        line, *rest = path.read_text().splitlines()
        path.write_text("\n".join([json.dumps(change(json.loads(line))), *rest]) + "\n")

    return damage


def cut(path):
    path.write_text(path.read_text()[:-20])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (WORKLOADS, cut),
        (WORKLOADS, lambda path: path.unlink()),
        (WORKLOADS, lambda path: path.write_bytes(b"\xff\n")),
        (WORKLOADS, first_line(lambda line: ["1", line[1]])),
        (WORKLOADS, first_line(lambda line: [line[0], "AAAA"])),
        (WORKLOADS, first_line(lambda line: {})),
        (TUNING_RECORDS, cut),
        (TUNING_RECORDS, lambda path: path.unlink()),
        (TUNING_RECORDS, first_line(lambda line: [7, line[1]])),
        (TUNING_RECORDS, first_line(lambda line: [line[0], [[], [1.0], {}, []]])),
        (TUNING_RECORDS, first_line(lambda line: [line[0], None])),
        (TUNING_RECORDS, first_line(lambda line: 3)),
    ],
)
def test_a_damaged_database_is_named(folder, name, damage):
    damage(folder / name)
    with pytest.raises(BitMTPError, match=name) as fault:
        Tuned.open(folder, get_target("cpu"))
    assert "\n" not in str(fault.value)


def test_decisions_of_another_space_are_refused(tmp_path):
    """As a later version of this package might offer other values."""

    def steps(schedule, decide):
        decide.one_of("grain", [1, 3], 1)

    other = replace(operation(norm()), space=sampled.Space(lambda func, *_: func, steps))
    write(tmp_path, with_record(read_database(tmp_path), other, CPU, {"grain": 3}, 1e-6))
    write_device_info(tmp_path, DeviceInfo("cpu", "this one"))
    with pytest.raises(BitMTPError, match=r"does not fit norm_quantize any more \(grain was one"):
        Tuned.open(tmp_path, get_target("cpu")).schedule(norm(), CPU)


@pytest.mark.parametrize("decided", [{"grain": 3}, {"grains": 1}])
def test_a_decision_that_the_space_does_not_have(decided):
    with pytest.raises(ValueError, match="grain"):
        operation(norm()).function(decided)


OPERATIONS = [
    ops.embed(50, 72),
    ops.final_norm(72, EPS),
    ops.gated_norm_quantize(72, EPS),
    ops.gated_quantize(256, 128),
    ops.greedy(50),
    ops.head(50, 72),
    ops.low_bit_embed(50, 256, "llvm", "binary-g128"),
    ops.low_bit_linear((24, 16), 256, "llvm", "bitnet-ternary", residual=True),
    ops.low_bit_linear((24, 16), 256, "llvm", "ternary-g128"),
    ops.low_bit_linear((24, 16), 256, "llvm", "binary-g128"),
    ops.norm_quantize(256, EPS, 128),
    ops.qk_norm(4, 2, 16, EPS),
    ops.quantize(256, 128),
    ops.rope_kv_write(4, 2, 16, 20, 24),
    attention_ops.attention(4, 2, 16, 24, False),
    attention_ops.attention(4, 2, 16, 24, True),
    choose_ops.softmax_parts(50),
]


def test_every_space_finds_its_records_again(tmp_path):
    """Through the files: what TVM reads back must be what it wrote."""
    found = [operation(bind_dims(func, {"width": 4, "rows": 4})) for func in OPERATIONS]
    spaces = {op for op, entry in rule.RULES["llvm"].items() if isinstance(entry, sampled.Space)}
    assert {one.work.op for one in found} == spaces
    database = read_database(tmp_path)
    for one in found:
        last = {name: values[-1] for name, values in one.schedule()[1].values.items()}
        database = with_record(database, one, CPU, last, 1e-6)
    write(tmp_path, database)
    again = read_database(tmp_path)
    assert len(again) == len(found)
    for one in found:
        decided = recorded_decisions(again, one, CPU, tmp_path)
        assert decided == {name: values[-1] for name, values in one.schedule()[1].values.items()}


def test_an_operation_without_a_choice_is_fixed():
    assert Tuned().schedule(norm(1), CPU)[1].provenance == "fixed"


def test_every_decision_gives_the_same_bits(rng):
    import numpy as np

    codes, q = rng.integers(0, 3, (40, 200)).astype(np.uint8), quantized(rng, 8, 200)
    scale, total = rng.random(8, np.float32), q.sum(1, dtype=np.int32)
    kernels = {
        ops.low_bit_linear((40,), 200, "llvm", "bitnet-ternary"): [
            q,
            scale,
            total,
            pack(codes, "llvm"),
            np.ones(1, np.float32),
            normal(rng, 8, 40),
        ],
        ops.embed(50, 72): [
            rng.integers(0, 50, 8).astype(np.int32),
            rng.integers(0, 1 << 15, (50, 72)).astype(np.uint16),
            normal(rng, 8, 72),
        ],
    }
    for func, arguments in kernels.items():
        found = operation(bind_dims(func, {"width": 8}))
        ways = list(found.combinations())
        assert len(ways) == found.count() > 10
        results = [run(found.function(way), arguments)[-1] for way in (ways[0], *ways[1::7])]
        assert len(results) > 3
        assert {result.tobytes() for result in results} == {results[0].tobytes()}
