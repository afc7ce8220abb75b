"""Which rows the next steps run: the most tokens per millisecond that acceptance and t(W) promise.

Speculation must pay for its width. The policy counts what a request accepts, and by t(W) never
lets drafting lose more than 2 or 3 % against plain decoding, or some ten plain steps at the start.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bitmtp_tvm.acceptance import Acceptance
from bitmtp_tvm.modes import UNVERIFIED, DecodeOptions
from bitmtp_tvm.step_times import StepTimes
from relax_models.state import MOST_ROWS, STATE_WORDS, Layout, Word

STICKY = 1.03
"""The new choice must be better by this factor: rates are estimates, which waver, and a change out
of a wider bucket may begin with a step that holds its chains."""

LOSS, PROMISING_LOSS = 0.015, 0.03
"""Share of plain decoding's time that trying may lose; more where drafting promises much, so that a
text which turns easy is soon found out."""

GRACE, PROMISING_GRACE = 250, 325
"""That share counts as if at least so many tokens had been decoded: something must be tried. The
first tokens of a text are its hardest."""

PROMISING = 1.3
"""Times plain decoding's rate that acceptance before any step is seen must promise for that."""

LEAST_STEPS = 2
"""One step finds drafts and the next one tests them: fewer tell nothing."""

BEGINNING = 40
"""Steps at the start of a request that its choice must be able to pay for, if they accept nothing:
the first tokens of a text are its hardest, and wide steps that cannot last would end the trying."""

TRIAL_STEPS = 4
TRIAL_COST = 0.5
"""Of a plain step: what a trial is charged for its end, where the device waits until the host has
seen what the last steps gave."""

UNLIMITED = 16
"""Steps that are affordable without looking again between chunks."""

REVIEW = 4, 16
"""Steps between two looks at the choice: at the start, and later. A few say too little."""


@dataclass(frozen=True)
class StepChoice:
    """What the next chunk runs: a bucket, and the state's words for its rows.

    `most_steps`: steps to enqueue at most before the policy is asked again, None where that is all
    the same.
    """

    width: int
    layout: Layout
    masks: int
    most_drafts: int
    most_chain: int
    most_steps: int | None = None

    @property
    def words(self) -> dict[Word, int]:
        """Values of the state's words; they name the choice, its bucket included."""
        return {
            Word.LAYOUT: int(self.layout),
            Word.MASKS: self.masks,
            Word.MOST_DRAFTS: self.most_drafts,
            Word.MOST_CHAIN: self.most_chain,
        }


def plain_choice(widths: Sequence[int]) -> StepChoice:
    """One row at a time, in the smallest bucket."""
    return StepChoice(widths[0], Layout.CHAIN, 0, 0, widths[0] - 1)


def fixed_choice(options: DecodeOptions, widths: Sequence[int]) -> StepChoice:
    """The best bucket of a layout that is asked for (`chain` or `outcomes`)."""
    if options.layout == "outcomes":
        return max(candidates(options, widths, Layout.OUTCOMES), key=lambda c: _rank(options, c))
    block = options.block_size
    width = next((w for w in widths if w >= 1 + 2 * block), widths[-1])
    drafts = width - 1 - block if options.bidirectional else (width - 1) // 2
    drafts = min(block, drafts)
    masks = min(block, width - 1 - drafts)
    return _choice(options, width, Layout.CHAIN, drafts, masks)


def _rank(options: DecodeOptions, choice: StepChoice) -> tuple[bool, int, int, int]:
    # Hybrid with fewer masks than min_chain would never commit a chain.
    chains = options.mode != "hybrid" or choice.masks >= options.min_chain
    depth = min(choice.most_drafts, choice.masks)
    return chains, depth, choice.masks, -choice.width


def candidates(
    options: DecodeOptions, widths: Sequence[int], layout: Layout
) -> tuple[StepChoice, ...]:
    """Every useful pair of drafts and masks, each in the smallest bucket that holds its rows."""
    block, drafting = options.block_size, options.mode != "confidence"
    found = []
    for masks in (block,) if options.bidirectional else range(1, block + 1):
        for drafts in _useful_drafts(options, masks):
            blocks = drafts + 1 if layout == Layout.OUTCOMES else 1
            rows = 1 + drafts + blocks * masks
            # After a committed chain as many pending rows stand before the masks, and confidence
            # lives of chains; elsewhere a row short costs the last mask now and then, where a wider
            # bucket costs time always.
            roomy = rows if drafting else max(rows, 2 * masks)
            fitting = [w for w in widths if w >= roomy] or [w for w in widths if w >= rows]
            if fitting:
                room = (fitting[0] - 1 - drafts) // blocks
                # Rows that would be padding show how far blocks are sure: wider may pay.
                most = min(block, room) if drafting else masks
                found.append(_choice(options, fitting[0], layout, drafts, most))
    return tuple(dict.fromkeys(found))


def _useful_drafts(options: DecodeOptions, masks: int) -> Sequence[int]:
    if options.mode == "confidence":
        return (0,)
    # Speculative uses no mask beyond the last draft; hybrid's chains do.
    least = masks if options.mode == "speculative" and not options.bidirectional else 1
    return range(least, masks + 1)


def _choice(
    options: DecodeOptions, width: int, layout: Layout, drafts: int, masks: int
) -> StepChoice:
    # A bidirectional block is never shortened: a chain must leave it its room.
    reserved = masks if options.bidirectional else 0
    return StepChoice(width, layout, masks, drafts, width - 1 - reserved)


class Policy:
    """The choices for one engine's requests, one after the other.

    `choice()` begins a request, `update()` follows it. What one request taught serves the next.
    """

    def __init__(self, options: DecodeOptions, widths: Sequence[int], times: StepTimes) -> None:
        """`widths`: the decode buckets, ascending, each with its time in `times`."""
        self._options = options
        self._times = times.milliseconds
        self._plain = plain_choice(widths)
        self._candidates: tuple[StepChoice, ...] = ()
        self._current = self._plain
        if options.mode != "ar" and options.layout == "auto":
            self._candidates = self._promising(widths, times.measured)
        elif options.mode != "ar":
            self._current = fixed_choice(options, widths)
        self._by_words = {_key(c.words): c for c in (*self._candidates, self._plain)}
        self._first = self._current
        self.forget()
        best = max((self._rate(c) for c in self._candidates), default=0.0)
        promising = best > PROMISING * self._rate(self._plain)
        self._loss = PROMISING_LOSS if promising else LOSS
        self._grace = PROMISING_GRACE if promising else GRACE

    def forget(self) -> None:
        """Be as new: nothing is learned, and nothing lost."""
        alone = self._options.mode in UNVERIFIED
        self._acceptance = Acceptance(self._options.block_size, alone)
        self._current = self._incumbent = self._first
        # Milliseconds: lost to plain decoding so far, and what plain decoding would have taken.
        self._lost = self._plain_time = 0.0
        self._begin()

    def choice(self) -> StepChoice:
        """The first chunk of a new request."""
        self._begin()
        if self._candidates:
            self._current = self._decide()
        return self._current

    def update(self, state: np.ndarray) -> StepChoice:
        """The next chunk, after a read-back; the same object while nothing changes.

        `state` `(STATE_WORDS,)` int32 as the device left it. After an unverified chain its pending
        rows may be more than the chosen bucket holds: the step after it needs a wider one.
        """
        if not self._candidates:
            return self._current
        self._observe(state)
        if self._steps >= self._review or not self._affordable(self._current):
            self._current = self._decide()
        return self._current

    def expected(self, choice: StepChoice) -> float:
        """Tokens per step that the running acceptance promises."""
        never = choice.masks + 1
        first = {"confidence": 1, "hybrid": self._options.min_chain}
        return self._acceptance.tokens_per_step(
            choice.layout,
            drafts=choice.most_drafts,
            masks=choice.masks,
            min_chain=first.get(self._options.mode, never),
            most_chain=choice.most_chain,
        )

    def _promising(self, widths: Sequence[int], measured: bool) -> tuple[StepChoice, ...]:
        """The candidates that would beat plain decoding if everything were accepted."""
        found = candidates(self._options, widths, Layout.CHAIN)
        # Wide steps are a bet on the table: not on one that is itself a guess.
        if measured and self._options.mode != "confidence":
            found += candidates(self._options, widths, Layout.OUTCOMES)
        drafting = self._options.mode == "speculative"
        most = {c: 1 + (c.most_drafts if drafting else c.masks) for c in found}
        limit = STICKY / self._times[self._plain.width]
        return tuple(c for c in found if most[c] / self._times[c.width] > limit)

    def _begin(self) -> None:
        self._counters = np.zeros(STATE_WORDS - Word.FORWARDS, np.int64)
        self._steps = self._review = 0
        # An earlier request's gain is no licence to lose in this one.
        self._lost = max(0.0, self._lost)
        self._trying = False

    def _observe(self, state: np.ndarray) -> None:
        """Learn from the steps since the last read-back, and charge their time."""
        counters = state[Word.FORWARDS :].astype(np.int64)
        new, self._counters = counters - self._counters, counters
        forwards, _, *tokens = (int(n) for n in new[: Word.STOP_IDS - Word.FORWARDS])
        ran = self._by_words.get(_key(state), self._current)
        by_position = new[Word.EVALUATED - Word.FORWARDS :].reshape(5, MOST_ROWS)
        self._acceptance.add(by_position[:, : self._options.block_size], ran.most_drafts, forwards)
        plain = sum(tokens) * self._times[self._plain.width]
        self._plain_time += plain
        self._lost += forwards * self._times[ran.width] - plain
        self._steps += forwards
        if _key(state) != _key(self._current.words):
            # They were under way when the choice was made, and are none of its steps.
            self._review += forwards

    def _affordable(self, choice: StepChoice, most: int = UNLIMITED) -> int:
        """Steps of `choice` that may be lost, up to `most`; each commits one token at the least."""
        plain = self._times[self._plain.width]
        extra = self._times[choice.width] - plain
        allowed = self._loss * max(self._plain_time, self._grace * plain) - self._lost
        return most if extra <= 0 else max(0, min(most, int(allowed / extra)))

    def _decide(self) -> StepChoice:
        self._review = self._steps + max(REVIEW[0], min(REVIEW[1], self._steps // 2))
        rates = {c: self._rate(c) for c in (*self._candidates, self._plain)}
        least = max(LEAST_STEPS, BEGINNING - self._steps)
        usable = [c for c in rates if self._affordable(c, BEGINNING) >= least]
        if self._incumbent not in usable:
            self._incumbent = self._plain
        best = max(usable, key=lambda c: rates[c])
        if rates[best] > STICKY * rates[self._incumbent]:
            self._incumbent = best
        if self._incumbent is self._plain:
            return self._trial(rates)
        self._trying = False
        steps = self._affordable(self._incumbent)
        return self._incumbent if steps == UNLIMITED else replace(self._incumbent, most_steps=steps)

    def _trial(self, rates: dict[StepChoice, float]) -> StepChoice:
        """A few steps of the likeliest candidate: plain steps would never learn better."""
        likely = max(self._candidates, key=lambda c: rates[c])
        if rates[likely] < rates[self._plain]:
            paid = [c for c in self._candidates if self._affordable(c) >= TRIAL_STEPS]
            likely = max(paid, key=lambda c: rates[c], default=likely)
        # One that should win but cannot be paid for yet is worth saving for.
        self._trying = self._affordable(likely) >= TRIAL_STEPS and not self._trying
        if not self._trying:
            return self._plain
        self._lost += TRIAL_COST * self._times[self._plain.width]
        self._review = self._steps + TRIAL_STEPS
        return replace(likely, most_steps=TRIAL_STEPS)

    def _rate(self, choice: StepChoice) -> float:
        return self.expected(choice) / self._times[choice.width]


def _key(words: dict[Word, int] | np.ndarray) -> tuple[int, ...]:
    return tuple(
        int(words[w]) for w in (Word.LAYOUT, Word.MASKS, Word.MOST_DRAFTS, Word.MOST_CHAIN)
    )
