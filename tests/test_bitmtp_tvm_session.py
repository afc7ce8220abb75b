"""The cpu artifact against transformers and the numpy twin; the promises on slots and widths."""

import numpy as np
import pytest
from bitnet_checkpoint import (
    DEMO,
    ODD,
    WIDE,
    load_transformers,
    transformers_logits,
    write_checkpoint,
)
from qwen3_checkpoint import TIED, UNTIED, load_qwen3, logits_of, write_qwen3

from bitmtp_tvm.artifact import open_artifact
from bitmtp_tvm.checkpoint import open_checkpoint
from bitmtp_tvm.compile import CompileOptions, compile_model
from bitmtp_tvm.reference.model import ReferenceModel
from bitmtp_tvm.session import Session, chunk_width
from relax_models.formats import FORMATS

WIDTHS = (1, 2, 3, 8)
TOKENS = 24


class Case:
    """A checkpoint, the session over its cpu artifact, and some of its tokens."""

    def __init__(self, checkpoint, directory, quant=None):
        compile_model(
            CompileOptions("cpu", str(checkpoint), quant=quant, widths=WIDTHS, output=directory)
        )
        self.path = checkpoint
        self.session = Session(open_artifact(directory))
        self.checkpoint = open_checkpoint(checkpoint, quant=quant)
        vocab_size = self.checkpoint.config.vocab_size
        self.tokens = np.random.default_rng(3).integers(0, vocab_size, TOKENS).astype(np.int32)

    def twin(self, tokens=None, positions=None, visible=None):
        """Logits and cache of the numpy twin with keys and values rounded to float16."""
        tokens = self.tokens if tokens is None else tokens
        positions = np.arange(len(tokens)) if positions is None else positions
        model = ReferenceModel.from_checkpoint(self.checkpoint, 64)
        cache = model.new_cache(64, half=True)
        return model.forward(tokens, positions, 0, visible, cache), cache

    def transformers(self):
        """Logits of transformers' own model of the checkpoint's files."""
        if self.checkpoint.config.architecture == "qwen3":
            return logits_of(load_qwen3(self.path), self.tokens)
        return transformers_logits(load_transformers(self.path), self.tokens)


@pytest.fixture(scope="module", params=["odd", "wide", "demo", "ternary-g128", "binary-g128"])
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param in FORMATS:
        bits = FORMATS[request.param].bits
        write_qwen3(folder / "checkpoint", TIED if bits == 2 else UNTIED, bits=bits)
        return Case(folder / "checkpoint", folder / "artifact", request.param)
    if request.param == "demo":
        return Case(DEMO, folder / "artifact")
    sizes = {"odd": ODD, "wide": WIDE}[request.param]
    write_checkpoint(folder / "checkpoint", sizes, shard_bytes=20_000)
    return Case(folder / "checkpoint", folder / "artifact")


def decode_all(session, tokens, width):
    """Logits of every token, `width` rows a step from an empty cache."""
    found = []
    for at in range(0, len(tokens), width):
        part = tokens[at : at + width]
        chosen = session.decode(part, range(at, at + len(part)), at, None, range(len(part)))
        found.append(session.logits().copy())
        assert np.array_equal(chosen, found[-1].argmax(axis=1))
    return np.concatenate(found)


def test_logits_agree_with_the_twin_and_with_transformers(case):
    """Activations are rounded to int8, so a last-bit difference can grow to a step of the grid: the
    bound is on the spread, as it is between transformers in float32 and in float64. transformers
    runs a Qwen3 with float activations, so there the bound holds what int8 costs."""
    logits = decode_all(case.session, case.tokens, 1)
    spread = logits.std()
    twin, _ = case.twin()
    theirs = case.transformers()
    assert rms(logits - twin) < 0.02 * spread
    rounded = case.checkpoint.config.architecture == "qwen3"
    assert rms(logits - theirs) < (0.06 if rounded else 0.03) * spread
    clear = np.sort(theirs, axis=1)
    sure = clear[:, -1] - clear[:, -2] > 0.2 * spread
    assert sure.sum() >= TOKENS // 3
    assert np.array_equal(logits.argmax(1)[sure], theirs.argmax(1)[sure])


def rms(values):
    return float(np.sqrt(np.mean(np.square(values))))


def test_a_row_is_the_same_in_every_bucket(case):
    alone = decode_all(case.session, case.tokens, 1)
    for width in (2, 3, 5, 8):
        assert np.array_equal(decode_all(case.session, case.tokens, width), alone), width


def test_prefill_writes_what_decode_writes(case):
    layers = case.checkpoint.config.num_hidden_layers
    decode_all(case.session, case.tokens, 1)
    decoded = [case.session.kv(layer)[:, :, :TOKENS] for layer in range(layers)]
    for layer in range(layers):
        case.session._parameters[f"layers_{layer}_kv_cache"].copyfrom(
            np.full_like(case.session.kv(layer), 9)
        )
    case.session.prefill(case.tokens[:10], 0)
    case.session.prefill(case.tokens[10:], 10)
    for layer in range(layers):
        assert np.array_equal(case.session.kv(layer)[:, :, :TOKENS], decoded[layer]), layer


def test_keys_and_values_agree_with_the_twin(case):
    case.session.prefill(case.tokens, 0)
    _, cache = case.twin()
    keys, values = case.session.kv(0)[:, :, :TOKENS].astype(np.float32)
    np.testing.assert_allclose(keys, cache.keys[0, :, :TOKENS], rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(values, cache.values[0, :, :TOKENS], rtol=2e-3, atol=2e-3)


def test_rows_see_what_their_mask_says(case):
    """A pending row, a draft, and two mask rows that share positions and do not see each other."""
    tokens = case.tokens[:8]
    positions = np.array([0, 1, 2, 3, 4, 5, 4, 5])
    visible = np.tri(8, dtype=bool)
    visible[6:, 4:6] = False
    twin, _ = case.twin(tokens, positions, visible)
    case.session.decode(tokens, positions, 0, visible, [3, 5, 7])
    logits = case.session.logits()
    assert rms(logits - twin[[3, 5, 7]]) < 0.02 * twin.std()
    blind, _ = case.twin(tokens, positions, None)
    assert rms(logits[2] - blind[7]) > 0.05 * twin.std()


def test_padding_and_stale_slots_change_nothing(case):
    """Seven rows run in the bucket of eight, over slots that hold another text."""
    case.session.prefill(case.tokens[::-1].copy(), 0)
    case.session.prefill(case.tokens[:5], 0)
    case.session.decode(case.tokens[5:12], range(5, 12), 5, None, range(7))
    late = case.session.logits().copy()
    assert np.array_equal(late, decode_all(case.session, case.tokens[:12], 1)[5:])


def test_only_the_rows_that_ask_get_logits(case):
    case.session.decode(case.tokens[:3], range(3), 0, None, [2])
    assert case.session.logits().shape == (1, case.session.vocab_size)
    assert np.array_equal(case.session.logits()[0], decode_all(case.session, case.tokens[:3], 1)[2])


def test_slots_outside_the_context_are_refused(case):
    context = case.session.context
    with pytest.raises(ValueError, match="slots"):
        case.session.prefill([1, 2], context - 1)
    with pytest.raises(ValueError, match="slots"):
        case.session.decode([1], [context], context, None, [0])
    with pytest.raises(ValueError, match="rows"):
        case.session.decode([1] * 9, range(9), 0, None, [0])


def test_the_last_slot_of_the_context_can_be_used(case):
    context = case.session.context
    case.session.prefill([5] * (context - 1), 0)
    chosen = case.session.decode([5], [context - 1], context - 1, None, [0])
    assert 0 <= chosen[0] < case.session.vocab_size


def test_chunk_widths():
    widths = (1, 2, 4, 8, 16, 128)
    assert [chunk_width(n, widths) for n in (1, 3, 5, 16, 17, 37, 64, 65, 128, 1000)] == [
        1,
        4,
        8,
        16,
        16,
        16,
        16,
        128,
        128,
        128,
    ]
    assert chunk_width(1, (4, 8)) == 4


@pytest.mark.parametrize("entry", ["step", "prefill"])
def test_kernels_are_observed_with_what_a_run_gives_them(case, entry):
    session, width = case.session, 8
    names, lasting = [], set()

    def seen(name, function, arguments):
        names.append(name)
        lasting.update(label for _, label in arguments)
        assert all(tensor.shape for tensor, _ in arguments) and callable(function)

    before = session.decode([1], [0], 0, None, [0])
    session.observe(entry, width, 0, seen)
    layers = case.checkpoint.config.num_hidden_layers
    assert sum(name.startswith("rope_kv_write") for name in names) == layers
    assert {name.rpartition("_w")[2] for name in names} == {"8"}
    assert {kernel.name for kernel in session.manifest.kernels} >= set(names)
    assert {f"layers_{i}_kv_cache" for i in range(layers)} <= lasting
    # The session itself is not observed.
    count = len(names)
    assert np.array_equal(session.decode([1], [0], 0, None, [0]), before)
    assert len(names) == count
