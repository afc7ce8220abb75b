"""The decode loop's state as the device holds it: one int32 buffer, and a ring of committed tokens.

Both sides share this layout: the kernels of `relax_models.step_ops`, and the host that starts a
request and reads the buffer back. No TVM here. Floats are stored as their bits.

The words of `algorithm`: n is the committed length, b the materialised boundary; tokens[b:n) are
pending, and up to MOST_ROWS - 1 drafts stand behind them.
"""

from enum import IntEnum

MOST_ROWS = 64
"""Rows of the widest step: a row's view of its step is one bit a row, in two words."""

MOST_STOPS = 16
"""End tokens of a request."""

RING = 4096
"""Committed tokens that the ring holds: a power of two, more than two chunks can commit."""

NEVER = 0x7FFFFFFF
"""In `seen`: the token does not stand in the sequence."""


class Mode(IntEnum):
    """What a step does with a valid run of mask rows."""

    AR = 0
    CONFIDENCE = 1
    SPECULATIVE = 2
    HYBRID = 3


class Layout(IntEnum):
    """Where mask rows stand: after the last draft, or a block for each count of accepted drafts."""

    CHAIN = 0
    OUTCOMES = 1


class Finish(IntEnum):
    """Why a sequence does not grow any more; BROKEN: a row had no finite logit."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    BROKEN = 3


class Kind(IntEnum):
    """How a token came to be committed."""

    TARGET = 0
    DRAFT = 1
    UNVERIFIED = 2


class Word(IntEnum):
    """Places in the state `(STATE_WORDS,)` int32. Floats: those marked f32, as their bits."""

    # The sequence. LENGTH is n, BOUNDARY b, DRAFTS the drafts that wait behind the pending tokens.
    LENGTH = 0
    BOUNDARY = 1
    DRAFTS = 2
    FINISH = 3
    # The request. LIMIT: n may not exceed it. MASKS: mask rows a block; MOST_DRAFTS: drafts a step;
    # MOST_CHAIN: unverified tokens a step, so that all pending ones fit the widest bucket.
    LIMIT = 4
    MODE = 5
    LAYOUT = 6
    MASKS = 7
    MOST_DRAFTS = 8
    MOST_CHAIN = 9
    MIN_CHAIN = 10
    THRESHOLD = 11  # f32
    DRAFT_THRESHOLD = 12  # f32
    MASK_TOKEN = 13
    BIDIRECTIONAL = 14
    # Sampling: TEMPERATURE 0 is greedy, TOP_K 0, TOP_P 1, MIN_P 0 and PENALTY 1 change nothing.
    TEMPERATURE = 15  # f32
    TOP_K = 16
    TOP_P = 17  # f32
    MIN_P = 18  # f32
    PENALTY = 19  # f32
    SEED_LOW = 20
    SEED_HIGH = 21
    STOPS = 22
    # Rows of the step under way, as `step_rows` laid them out; without a pending one it is idle.
    ROW_PENDING = 23
    ROW_DRAFTS = 24
    ROW_MASKS = 25  # a block
    ROW_BLOCKS = 26
    # Counters of the request: steps that did something and that did not, tokens by kind.
    FORWARDS = 27
    IDLE = 28
    TARGET_TOKENS = 29
    DRAFT_TOKENS = 30
    UNVERIFIED_TOKENS = 31
    # Arrays: end tokens; pending tokens and then drafts.
    STOP_IDS = 32
    TAIL = STOP_IDS + MOST_STOPS
    # Counters by position j = 0, 1, … of a draft, or of a mask row in a valid block: drafts that
    # were compared with their target (all before them right), and those found right; mask rows
    # offered, and those in the leading run above draft_threshold and threshold.
    EVALUATED = TAIL + MOST_ROWS
    ACCEPTED = EVALUATED + MOST_ROWS
    OFFERED = ACCEPTED + MOST_ROWS
    PROPOSED = OFFERED + MOST_ROWS
    CHAINED = PROPOSED + MOST_ROWS


STATE_WORDS = Word.CHAINED + MOST_ROWS


class Ring(IntEnum):
    """Rows of the ring `(3, RING)` int32; the token at position i stands in column i % RING.

    LOGPROB: float32 bits, natural logarithm at temperature 1.
    """

    TOKEN = 0
    LOGPROB = 1
    KIND = 2


RING_ROWS = 3
