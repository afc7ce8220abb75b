"""What the decode step must do, whoever computes it: numpy, the processor's kernels, a GPU's.

A test class inherits `StepProperties`; its module has a fixture `ops` (step_engine.StepOps).
"""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from decode_oracle import Choice
from fake_model import hashed, wrong, wrong_at
from hypothesis import HealthCheck, given, settings
from step_cases import (
    DRAFTING,
    END,
    MODES,
    PROMPT,
    WIDE,
    at_widths,
    cases,
    confident_in,
    draw_tokens,
    ride,
    same_but_for_the_step_under_way,
    truth,
)
from step_engine import Ride, apply, plain

from relax_models.state import RING, Kind, Ring, Word

bounded = settings(
    deadline=None,
    max_examples=60,
    # The same property runs in several classes, one for each kind of engine.
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)


class StepProperties:
    """Known failures of other decoders stand here under their names."""

    @bounded
    @given(case=cases())
    def test_every_step_is_what_the_oracle_says(self, ops, case):
        model, request, steps = case
        Ride(ops, model, request).finish(*at_widths(steps, ops))

    @bounded
    @given(case=cases(modes=("ar", "speculative")))
    def test_speculative_gives_what_one_token_at_a_time_gives(self, ops, case):
        model, request, steps = case
        made = Ride(ops, model, replace(request, penalty=1.0)).finish(*at_widths(steps, ops))
        wanted = truth(model, request)
        if wanted[-1] < 0:
            assert made == wanted[: len(made)]  # The failing step commits nothing.
        else:
            assert made == wanted

    @bounded
    @given(case=cases(modes=("speculative",)))
    def test_a_repetition_penalty_counts_drafts_and_keeps_the_tokens(self, ops, case):
        model, request, steps = case
        model.script.clear()
        # So strong that a token which stands anywhere loses to all that do not.
        request = replace(request, penalty=30.0)
        made = Ride(ops, model, request).finish(*at_widths(steps, ops))
        assert made == plain(ops, model, request)
        assert len({*request.prompt, *made}) == len(set(request.prompt)) + len(made)

    @pytest.mark.parametrize("layout", ["chain", "outcomes"])
    @pytest.mark.parametrize("bidirectional", [False, True])
    def test_acceptance_does_not_decay(self, ops, layout, bidirectional):
        """Rollback off by two: the output is right, but drafts fail more and more."""
        run = ride(ops, bidirectional=bidirectional, limit=3 + 1 + 5 * 6)
        run.finish(Choice(width=64, layout=layout))
        # The first step has no drafts; then four drafts and their target, each time.
        assert run.count(Word.FORWARDS) == 7
        evaluated = [run.count(Word.EVALUATED + j) for j in range(4)]
        assert evaluated == [6, 6, 6, 6]
        assert [run.count(Word.ACCEPTED + j) for j in range(4)] == evaluated

    def test_no_draft_accepted(self, ops):
        """Zero accepted: no row -1, one token a step, and drafts at every second one."""
        run = ride(ops, wrong)
        assert run.finish(Choice()) == run.model.continuation(PROMPT, 37)
        assert run.count(Word.FORWARDS) == run.count(Word.TARGET_TOKENS) == 37
        assert [run.count(Word.EVALUATED + j) for j in range(3)] == [18, 0, 0]
        assert run.count(Word.ACCEPTED) == run.count(Word.DRAFT_TOKENS) == 0

    def test_only_the_last_draft_rejected(self, ops):
        """`chain` has no drafts after a rejection, `outcomes` has them in every step."""
        chain = ride(ops, wrong_at([3]), limit=3 + 1 + 5 * 6)
        chain.finish(Choice(width=64))
        outcomes = ride(ops, wrong_at([3]), limit=3 + 1 + 4 * 7)
        outcomes.finish(Choice(width=64, layout="outcomes"))
        assert chain.count(Word.FORWARDS) == 1 + 2 * 6
        assert outcomes.count(Word.FORWARDS) == 1 + 7
        assert outcomes.count(Word.EVALUATED + 3) == 6 and outcomes.count(Word.ACCEPTED + 3) == 0

    @pytest.mark.parametrize("mode", MODES)
    def test_a_prompt_of_one_token_at_every_width(self, ops, mode):
        """b = 0: padding sees itself, and no slot before the first."""
        for width in ops.widths:
            run = ride(ops, prompt=(9,), limit=20, mode=mode)
            masks = 0 if mode == "ar" else 4
            assert run.finish(Choice(width=width, masks=masks, most_chain=width - 1)) == (
                run.model.continuation((9,), 19)
            )

    def test_any_order_of_widths(self, ops):
        """Stale rows of a wide step are nothing to the narrow one that follows."""
        widths = [ops.widths[0], ops.widths[len(ops.widths) // 2], *ops.widths[-2:]]
        for order in permutations(widths):
            for mode in DRAFTING:
                run = ride(ops, hashed(5), mode=mode, prompt=(7, 7))
                run.finish(*(Choice(width=width) for width in order))
                if mode == "speculative":
                    assert run.new_tokens == truth(run.model, run.request)

    def test_a_bucket_that_is_too_narrow_does_nothing(self, ops):
        run = ride(ops, mode="confidence")
        run.step(WIDE)
        assert len(run.oracle.pending) == 5
        before, ring = run.engine.read()
        run.step(replace(WIDE, width=3))
        after, ring_after = run.engine.read()
        assert same_but_for_the_step_under_way(before, after)
        assert (ring == ring_after).all() and run.count(Word.IDLE) == 1
        assert run.finish(WIDE) == run.model.continuation(PROMPT, 37)

    def test_a_chunk_of_steps_is_its_steps(self, ops):
        """Nothing that a step needs is fixed when the chunk begins."""
        single = ride(ops, hashed(8))
        for _ in range(5):
            single.step(Choice())
        chunk = ride(ops, hashed(8))
        apply(Choice(), chunk.engine.state)
        chunk.engine.run(16, 5)
        for one, other in zip(single.engine.read(), chunk.engine.read(), strict=True):
            assert (one == other).all()

    @pytest.mark.parametrize(("sure", "unverified"), [(0, 0), (2, 0), (3, 3), (4, 4)])
    def test_hybrid_commits_chains_of_min_chain_tokens(self, ops, sure, unverified):
        """`sure` mask rows are above both thresholds, the others above that of drafts alone."""
        run = ride(ops, confident_in(sure), mode="hybrid", min_chain=3)
        run.step(Choice())
        assert run.count(Word.UNVERIFIED_TOKENS) == unverified
        assert run.count(Word.DRAFTS) == (0 if unverified else 4)
        assert run.count(Word.LENGTH) == 3 + 1 + unverified
        assert run.count(Word.BOUNDARY) == 3

    def test_fewer_masks_than_min_chain_commit_nothing_unverified(self, ops):
        run = ride(ops, mode="hybrid", min_chain=4)
        assert run.finish(Choice(masks=3)) == run.model.continuation(PROMPT, 37)
        assert run.count(Word.UNVERIFIED_TOKENS) == 0 and run.count(Word.DRAFT_TOKENS) > 20

    @pytest.mark.parametrize(("most", "pending"), [(0, 1), (2, 3), (9, 5)])
    def test_a_chain_is_cut_to_fit_the_widest_bucket(self, ops, most, pending):
        run = ride(ops, mode="confidence")
        run.step(replace(WIDE, most_chain=most))
        assert len(run.oracle.pending) == pending

    @pytest.mark.parametrize(("mode", "least"), [("speculative", 0.5), ("confidence", 0.9)])
    @pytest.mark.parametrize("broken", [False, True])
    def test_a_confidence_that_equals_the_threshold_suffices(self, ops, mode, least, broken):
        """The run ends at the next float below it, or at a row that chose nothing."""
        engine = ride(ops, mode=mode).engine
        apply(WIDE, engine.state)
        ops.step_rows(engine.state, 8)
        token, confidence = np.arange(20, 28, dtype=np.int32), np.full(8, least, np.float32)
        if broken:
            token[3] = -1
        else:
            confidence[3] = np.nextafter(np.float32(least), np.float32(0))
        chosen = token, confidence, np.zeros(8, np.float32)
        ops.accept(engine.state, engine.ring, engine.seen, chosen)
        assert engine.state[Word.TAIL :][:3].tolist() == [20, 21, 22]
        found = engine.state[Word.DRAFTS], engine.state[Word.LENGTH]
        assert found == ((2, 4) if mode == "speculative" else (0, 6))

    def test_the_ring_wraps(self, ops):
        prompt = tuple(place % END for place in range(RING - 6))
        run = ride(ops, prompt=prompt, limit=RING + 9, context=RING + 9)
        assert len(run.finish(WIDE)) == 15
        assert run.engine.ring[Ring.KIND, :9].max() == Kind.DRAFT

    @pytest.mark.parametrize("mode", MODES)
    def test_a_rewound_sequence_goes_on_from_there(self, ops, mode):
        for length in range(3, 14):
            run = ride(ops, hashed(2), mode=mode)
            choice = Choice(masks=0 if mode == "ar" else 4)
            while len(run.oracle.tokens) < 13:
                run.step(choice)
            run.rewind(length)
            run.finish(choice)
            if mode in ("ar", "speculative"):
                assert run.new_tokens == run.model.continuation(PROMPT, 37)

    def test_logprobs_are_those_of_the_tokens(self, ops):
        run = ride(ops, hashed(3), mode="hybrid")
        run.finish(Choice())
        assert run.count(Word.UNVERIFIED_TOKENS) > 0
        logprob = run.engine.ring[Ring.LOGPROB, 3:40].view(np.float32)
        kinds = run.engine.ring[Ring.KIND, 3:40]
        np.testing.assert_allclose(logprob[kinds != Kind.UNVERIFIED], np.log(0.9), rtol=1e-4)
        np.testing.assert_allclose(logprob[kinds == Kind.UNVERIFIED], np.log(0.97), rtol=1e-4)

    @pytest.mark.parametrize("layout", ["chain", "outcomes"])
    @pytest.mark.parametrize("seed", [1, 2])
    def test_a_seeded_draw_is_the_same_in_every_mode_and_width(self, ops, layout, seed):
        plain_tokens, _ = draw_tokens(ops, "ar", seed, Choice(width=ops.widths[0], masks=0))
        for width in ops.widths:
            choice = Choice(width=width, layout=layout)
            tokens, state = draw_tokens(ops, "speculative", seed, choice)
            assert tokens == plain_tokens
            # Some drafts are drawn and some are not: the temperature is the verifier's too.
            if width == 64:
                assert 0 < state[Word.ACCEPTED] < state[Word.EVALUATED]

    def test_seeds_differ(self, ops):
        drawn = [draw_tokens(ops, "speculative", seed, WIDE)[0] for seed in (1, 2, 3)]
        assert drawn[0] != drawn[1] != drawn[2] != drawn[0]

    @pytest.mark.parametrize(
        ("masks", "waiting", "left", "layout", "bidirectional", "rows"),
        [
            (4, 0, 30, "chain", False, (0, 4)),
            (4, 4, 30, "chain", False, (3, 4)),
            (8, 4, 30, "chain", False, (0, 7)),
            (8, 4, 30, "chain", True, (0, 0)),
            (0, 4, 30, "chain", False, (4, 0)),
            (4, 4, 3, "chain", False, (2, 0)),
            (4, 2, 4, "chain", False, (2, 1)),
            (4, 2, 4, "chain", True, (2, 0)),
            (4, 0, 1, "chain", False, (0, 0)),
            (2, 4, 30, "outcomes", False, (1, 2)),
            (4, 4, 30, "outcomes", False, (0, 4)),
            (1, 4, 30, "outcomes", False, (3, 1)),
            (3, 1, 4, "outcomes", False, (1, 2)),
        ],
    )
    def test_rows_of_a_bucket_of_eight(
        self, ops, masks, waiting, left, layout, bidirectional, rows
    ):
        """Drafts give way first, then masks; a bidirectional block is whole or not there."""
        run = ride(ops, block=8, limit=3 + left, bidirectional=bidirectional)
        state = run.engine.state
        apply(Choice(layout=layout, masks=masks), state)
        state[Word.DRAFTS] = waiting
        ops.step_rows(state, 8)
        assert state[Word.ROW_PENDING] == 1
        assert (state[Word.ROW_DRAFTS], state[Word.ROW_MASKS]) == rows
        blocks = rows[0] + 1 if layout == "outcomes" else 1
        assert state[Word.ROW_BLOCKS] == (blocks if rows[1] else 0)
