"""How a sequence must end, whoever computes the decode step.

A test class inherits `StopProperties`; its module has a fixture `ops` (step_engine.StepOps).
"""

import pytest
from decode_oracle import Choice
from fake_model import ending
from step_cases import (
    END,
    MODES,
    PROMPT,
    broken_at,
    placed,
    ride,
    same_but_for_the_step_under_way,
    truth,
)

from relax_models.state import Finish, Word


class StopProperties:
    """Known failures of other decoders stand here under their names."""

    @pytest.mark.parametrize("mode", MODES)
    def test_a_stop_at_every_offset_of_a_block(self, ops, mode):
        for offset in range(12):
            run = ride(ops, script=placed(3 + offset, 5 + offset), mode=mode)
            made = run.finish(Choice(masks=0 if mode == "ar" else 4))
            assert made == [place % END for place in range(3, 3 + offset)] + [END]
            assert run.oracle.finish == "stop"
            # The end token is the last committed one: it was verified, and it is pending.
            assert run.oracle.committed[-1].kind != "unverified"
            assert run.count(Word.BOUNDARY) == run.count(Word.LENGTH) - 1

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("bidirectional", [False, True])
    def test_the_limit_at_every_offset_of_a_block(self, ops, mode, bidirectional):
        """Drafts past the context limit: no row stands there, and nothing is committed there."""
        for new in range(1, 14):
            run = ride(ops, limit=3 + new, context=3 + new, mode=mode, bidirectional=bidirectional)
            made = run.finish(Choice(masks=0 if mode == "ar" else 4))
            assert made == run.model.continuation(PROMPT, new)
            assert run.oracle.finish == "length"

    @pytest.mark.parametrize("mode", MODES)
    def test_a_stop_in_a_block_and_the_limit_come_in_token_order(self, ops, mode):
        """A limit that is checked before the block's stop reports the wrong one."""
        for limit, end, finish in (10, 9, "stop"), (10, 8, "stop"), (9, 9, "length"):
            run = ride(ops, script=placed(end), limit=limit, mode=mode)
            made = run.finish(Choice(masks=0 if mode == "ar" else 4))
            assert (run.oracle.finish, len(made)) == (finish, min(limit, end + 1) - 3)

    def test_only_what_is_delivered_is_counted(self, ops):
        """Tokens behind a stop are neither drafts nor targets, and a step is not a token."""
        run = ride(ops, script=placed(3 + 3), limit=60)
        run.finish(Choice())
        # The target of the first step; then two drafts, the end token, and no target behind it.
        words = Word.FORWARDS, Word.TARGET_TOKENS, Word.DRAFT_TOKENS, Word.UNVERIFIED_TOKENS
        assert [run.count(word) for word in words] == [2, 1, 3, 0]
        assert [run.count(Word.EVALUATED + j) for j in range(5)] == [1, 1, 1, 0, 0]
        assert run.count(Word.LENGTH) == 3 + 1 + 3

    @pytest.mark.parametrize("mode", MODES)
    def test_an_end_token_is_never_committed_unverified(self, ops, mode):
        """Mask rows that propose the end everywhere stop nothing."""
        for places in range(3, 40), (6, 11), (5, 7, 8):
            run = ride(ops, ending(END, places), script=placed(), mode=mode)
            assert run.finish(Choice(masks=0 if mode == "ar" else 4)) == truth(
                run.model, run.request
            )
            assert run.oracle.finish == "length"

    def test_a_prompt_with_an_end_token_goes_on(self, ops):
        run = ride(ops, prompt=(END, 4, END), script=placed(20))
        assert len(run.finish(Choice())) == 18

    def test_steps_after_the_end_do_nothing(self, ops):
        """The rest of a chunk that was under way when the sequence ended."""
        run = ride(ops, script=placed(11))
        run.finish(Choice())
        before, _ = run.engine.read()
        for width in ops.widths:
            run.step(Choice(width=width))
        assert same_but_for_the_step_under_way(before, run.engine.read()[0])
        assert run.count(Word.IDLE) == len(ops.widths)

    def test_rows_without_a_finite_logit(self, ops):
        """In a mask row the run ends there; in a target row the sequence does, and is BROKEN."""
        run = ride(ops, broken_at(7))
        assert run.finish(Choice()) == run.model.continuation(PROMPT, 37)
        # The step that fails commits the drafts in front of it, as plain decoding would.
        for place in 9, 8, 7:
            broken = ride(ops, script={place: -1}, stops=frozenset())
            wanted = broken.model.continuation(PROMPT, 37)
            assert wanted[-1] == -1 and len(wanted) == place - 2
            assert broken.finish(Choice()) == wanted[:-1]
            assert broken.count(Word.FINISH) == Finish.BROKEN and broken.count(Word.DRAFTS) == 0
