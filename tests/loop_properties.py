"""What algorithm and oracle promise of the decode loop, kept by compiled models.

A test class inherits `LoopProperties`; its module has a fixture `model` (Model).
"""

from itertools import cycle

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from bitmtp_tvm.artifact import open_artifact
from bitmtp_tvm.decoder import Decoder
from bitmtp_tvm.modes import resolve
from bitmtp_tvm.reference import choose
from bitmtp_tvm.reference.step import accept, new_state, step_rows
from bitmtp_tvm.sampling import SamplingOptions
from bitmtp_tvm.session import Session
from bitmtp_tvm.step_loop import first_state
from bitmtp_tvm.step_times import predict
from bitmtp_tvm.stopping import StopCondition
from relax_models.state import NEVER, RING, Finish, Layout, Ring, Word

WIDTHS = (1, 4, 9, 16)
LIMIT = 64
# Of the demo.
PYTHON = [272, 5, 288, 13, 300, 17, 44, 290]
PROMPTS = [[3], [5, 9], [7, 11, 13, 40, 41, 42, 43, 44, 45, 46, 30, 31, 32]]


class Model:
    """A compiled model; `session` keeps its caches from test to test, as a server's would."""

    def __init__(self, directory, prompts, graph=True):
        self.artifact = open_artifact(directory)
        self.session = Session(self.artifact, graph=graph)
        self.graph = graph
        self.prompts = prompts
        self.widths = self.session.widths
        self.mtp = self.artifact.manifest.config["mtp"]
        # A block for each outcome of one draft fits the widest bucket.
        self.masks = min(4, self.mtp["block_size"])
        self.layers = range(self.artifact.manifest.config["num_hidden_layers"])

    def options(self, mode="ar", **settings):
        return resolve(self.mtp, self.widths, mode=mode, **settings)

    def state(self, prompt, options, layout, masks, sampling=None, limit=LIMIT, ends=()):
        """The state of a request after its prefill; see StepLoop for what else goes into it."""
        sampling = sampling or SamplingOptions()
        state = first_state(prompt, len(prompt) - 1, limit, ends, options, sampling)
        words = {Word.LAYOUT: layout, Word.MASKS: masks, Word.MOST_DRAFTS: masks}
        for word, value in {**words, Word.MOST_CHAIN: 3}.items():
            state[word] = value
        return state

    def run(self, prompt, state, widths, seen=None):
        """Tokens and the last state, one step a chunk in the buckets that `widths` names."""
        if len(prompt) > 1:
            self.session.prefill(prompt[:-1], 0)
        self.session.write(state, seen)
        tokens = list(prompt)
        for width in widths:
            self.session.run(width, 1)
            state, ring = self.session.read()
            tokens += [int(ring[Ring.TOKEN, i % RING]) for i in range(len(tokens), state[0])]
            if state[Word.FINISH]:
                return tokens, state

    def run_changing(self, prompt, state, changes, ahead):
        """Tokens, and the states behind chunks of two steps, each with a bucket and words of its
        own. `ahead`: words follow what is under way; else all is read, and the state written."""
        session, first = self.session, len(prompt)
        session.prefill(prompt, 0)
        session.write(state)
        states, under_way = [], 0

        def read():
            state, ring = session.read()
            states.append(state)
            return state, ring[Ring.TOKEN, first : state[Word.LENGTH]].tolist()

        for width, words in changes:
            if ahead:
                session.adjust(words)
            else:
                state = state.copy()
                state[list(words)] = list(words.values())
                session.write(state)
            session.run(width, 2)
            under_way += 1
            if under_way == (session.depth if ahead else 1):
                state, tokens = read()
                under_way -= 1
        for _ in range(under_way):
            state, tokens = read()
        return tokens, states

    def plain(self, prompt, sampling=None, seen=None):
        """What plain decoding gives."""
        state = self.state(prompt, self.options(), Layout.CHAIN, 0, sampling)
        return self.run(prompt, state, cycle([1]), seen)[0]

    @property
    def prefill_tolerance(self):
        """Mean difference of keys and values from those of decode steps, as a share of their mean
        size. On a GPU prefill sums up attention in another tree, and int8 rounding flips."""
        return 0.02 if self.artifact.manifest.kind == "cuda" else 0.0

    def forward(self, tokens):
        """One causal forward over `tokens` from slot 0 on, in decode steps of the widest bucket."""
        most = self.widths[-1]
        for start in range(0, len(tokens), most):
            rows = tokens[start : start + most]
            self.session.decode(rows, range(start, start + len(rows)), start, None, [0])

    def caches(self, slots):
        """Keys and values of the first `slots` slots of every layer."""
        return [self.session.kv(layer)[:, :, :slots] for layer in self.layers]


def orders(widths, seed):
    """Buckets in an arbitrary order that repeats."""
    return cycle(np.random.default_rng(seed).choice(widths, 37).tolist())


def logits_of(session, rows, width):
    """Logits `(W, V)` of a step's rows, in a single forward without the loop."""
    asking = np.flatnonzero(rows.logit_rows >= 0)
    count = int(asking[-1]) + 1
    bits = rows.visible[:count].view(np.uint8)
    sees = np.unpackbits(bits, axis=1, bitorder="little")[:, :count].astype(bool)
    session.decode(
        rows.tokens[:count],
        rows.position[:count],
        int(rows.boundary[0]),
        sees,
        np.arange(count),
    )
    logits = np.zeros((width, session.vocab_size), np.float32)
    logits[:count] = session.logits()
    return logits


class LoopProperties:
    @pytest.mark.parametrize("layout", Layout)
    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_speculative_gives_the_tokens_of_ar_in_any_order_of_buckets(
        self, model, layout, temperature
    ):
        sampling = SamplingOptions(temperature=temperature, seed=11)
        # The thresholds at nothing: random models draft as well, and mostly in vain.
        options = model.options("speculative", draft_threshold=1e-6)
        for seed, prompt in enumerate(model.prompts):
            expected = model.plain(prompt, sampling)
            state = model.state(prompt, options, layout, model.masks, sampling)
            tokens, last = model.run(prompt, state, orders(model.widths, seed))
            assert tokens == expected and len(tokens) == LIMIT
            assert last[Word.EVALUATED] > 0 and last[Word.FINISH] == Finish.LENGTH

    def test_a_repetition_penalty_sees_what_ar_sees(self, model):
        sampling = SamplingOptions(repetition_penalty=20.0)
        options = model.options("speculative", draft_threshold=1e-6)
        for prompt in model.prompts:
            seen = np.full(model.session.vocab_size, NEVER, np.int32)
            for place in reversed(range(len(prompt))):
                seen[prompt[place]] = place
            expected = model.plain(prompt, sampling, seen)
            assert expected != model.plain(prompt)
            state = model.state(prompt, options, Layout.CHAIN, model.masks, sampling)
            assert model.run(prompt, state, cycle(model.widths[-2:]), seen)[0] == expected

    @pytest.mark.parametrize("mode", ["speculative", "hybrid", "confidence"])
    def test_the_cache_is_what_one_plain_forward_writes(self, model, mode):
        thresholds = {"threshold": 1e-6, "draft_threshold": 1e-6, "min_chain": 3}
        read = {"speculative": ("draft_threshold",), "confidence": ("threshold",)}
        names = read.get(mode, thresholds)
        options = model.options(mode, **{name: thresholds[name] for name in names})
        for prompt in model.prompts:
            state = model.state(prompt, options, Layout.CHAIN, model.masks)
            tokens, last = model.run(prompt, state, cycle(model.widths[-2:]))
            b = int(last[Word.BOUNDARY])
            assert b <= len(tokens) - 1
            found = model.caches(b)
            model.forward(tokens[:b])
            assert_array_equal(found, model.caches(b))
            model.session.prefill(tokens[:b], 0)
            for decoded, filled in zip(found, model.caches(b), strict=True):
                apart = np.abs(decoded.astype(np.float32) - filled)
                assert apart.mean() <= model.prefill_tolerance * np.abs(decoded).mean()

    @pytest.mark.parametrize("mode", ["speculative", "hybrid", "confidence"])
    @pytest.mark.parametrize("layout", Layout)
    def test_the_device_decides_as_the_numpy_twin_does(self, model, mode, layout):
        """The twin steps over the same model: rows from numpy, logits from the artifact."""
        thresholds = {"threshold": 0.02, "draft_threshold": 0.01, "min_chain": 2}
        names = {"speculative": ["draft_threshold"], "confidence": ["threshold"]}
        options = model.options(
            mode, **{name: thresholds[name] for name in names.get(mode, thresholds)}
        )
        prompt, widths = model.prompts[-1], cycle(model.widths[-2:])
        state = model.state(prompt, options, layout, model.masks)
        tokens, last = model.run(prompt, state.copy(), cycle(model.widths[-2:]))
        _, ring = new_state()
        seen = np.full(model.session.vocab_size, NEVER, np.int32)
        model.session.prefill(prompt[:-1], 0)
        while state[Word.FINISH] == Finish.RUNNING:
            width = next(widths)
            rows = step_rows(state, width)
            logits = logits_of(model.session, rows, width)
            accept(state, ring, seen, *choose(logits, rows.logit_rows, rows.horizon, state, seen))
        assert tokens[len(prompt) :] == ring[Ring.TOKEN, len(prompt) : LIMIT].tolist()
        assert_array_equal(last, state)

    @pytest.mark.parametrize("mode", ["speculative", "hybrid"])
    def test_words_may_change_behind_steps_that_are_under_way(self, model, mode):
        thresholds = {"draft_threshold": 0.01}
        if mode == "hybrid":
            # Some of the words allow chains, others are left with drafts.
            thresholds |= {"threshold": 0.02, "min_chain": 3}
        options, masks = model.options(mode, **thresholds), model.masks
        names = Word.LAYOUT, Word.MASKS, Word.MOST_DRAFTS, Word.MOST_CHAIN
        values = [
            (Layout.CHAIN, masks, masks, 3),
            (Layout.OUTCOMES, masks, 1, 2),
            (Layout.CHAIN, 0, 0, 0),
            (Layout.OUTCOMES, masks, masks, 3),
            (Layout.CHAIN, masks, 1, 3),
        ]
        # To the end and beyond it: every step commits a token.
        changes = [
            (model.widths[-1 - i % 2], dict(zip(names, map(int, values[i % 5]), strict=True)))
            for i in range(LIMIT // 2 + 1)
        ]
        for prompt in model.prompts:
            state = model.state(prompt, options, Layout.CHAIN, 0)
            tokens, states = model.run_changing(prompt, state.copy(), changes, ahead=True)
            expected, stops = model.run_changing(prompt, state.copy(), changes, ahead=False)
            assert tokens == expected and len(prompt) + len(tokens) == LIMIT
            assert_array_equal(states, stops)
            assert states[-1][Word.EVALUATED] > 0
            assert bool(states[-1][Word.UNVERIFIED_TOKENS]) == (mode == "hybrid")
            # A state that was read has the words of its own chunk.
            for (_, words), found in zip(changes, states, strict=True):
                assert found[list(words)].tolist() == list(words.values())

    def test_steps_after_the_stop_change_nothing(self, model):
        state = model.state([5, 9], model.options(), Layout.CHAIN, 0, limit=7)
        model.session.prefill([5], 0)
        model.session.write(state)
        model.session.run(4, 8)
        stopped, ring = model.session.read()
        assert stopped[Word.LENGTH] == 7 and stopped[Word.FINISH] == Finish.LENGTH
        # The processor leaves out what comes after the stop; a GPU has it enqueued by then.
        looks = model.artifact.manifest.kind != "cuda"
        assert stopped[Word.FORWARDS] == 5 and stopped[Word.IDLE] == (0 if looks else 3)
        cache = model.session.kv(0)[:, :, : stopped[Word.BOUNDARY]]
        model.session.run(16, 4)
        again, ring_again = model.session.read()
        # A chunk begins with a step, whatever the state says.
        stopped[Word.IDLE] += 1 if looks else 4
        stopped[Word.ROW_PENDING : Word.ROW_BLOCKS + 1] = 0
        assert_array_equal(again, stopped)
        assert_array_equal(ring_again, ring)
        assert_array_equal(model.session.kv(0)[:, :, : stopped[Word.BOUNDARY]], cache)

    def test_a_second_turn_gives_what_a_cold_start_gives(self, model):
        stop = StopCondition(frozenset(), 12, LIMIT)
        options = model.options("speculative", draft_threshold=1e-6)

        def answer(decoder, prompt):
            return list(decoder.generate(prompt, stop, options, SamplingOptions()))

        times = predict(model.artifact.manifest)
        warm = Decoder(model.session, times)
        first = answer(warm, model.prompts[-1])
        second = [*model.prompts[-1], *first, 21, 22]
        stream = warm.generate(second, stop, options, SamplingOptions())
        told = list(stream)
        assert stream.statistics.cached_tokens == len(second) - 3
        assert told == answer(Decoder(Session(model.artifact), times), second)
