"""The decode loop: it knows tokens, the committed length and the materialised boundary."""

import operator
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence

from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.flight import Flight, TokenSession
from bitmtp_tvm.modes import UNVERIFIED, DecodeOptions
from bitmtp_tvm.policy import Policy
from bitmtp_tvm.sampling import SamplingOptions
from bitmtp_tvm.statistics import Statistics
from bitmtp_tvm.step_loop import Committed, StepLoop, first_places, first_state
from bitmtp_tvm.step_times import StepTimes
from bitmtp_tvm.stopping import CANCELLED, LENGTH, STOP, StopCondition
from relax_models.state import Finish, Word

REASONS = {Finish.STOP: STOP, Finish.LENGTH: LENGTH}


def check_prompt(prompt_ids: Sequence[int], vocab_size: int, context: int) -> list[int]:
    """The prompt as a list of ints.

    Raises `UsageError` for an empty prompt, one longer than `context`, or an id outside
    [0, `vocab_size`): on the device such an id would read memory that is not the embedding's.
    """
    if isinstance(prompt_ids, bytes):
        raise UsageError("a prompt is a text or a list of token ids, not bytes: decode it first")
    try:
        tokens = [operator.index(token) for token in prompt_ids]
    except TypeError as fault:
        raise UsageError(f"a prompt is a text or a list of token ids: {fault}") from fault
    if not tokens:
        raise UsageError("the prompt has no tokens: give at least one")
    for place, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise UsageError(
                f"token id {token} at place {place} of the prompt is outside the vocabulary: ids "
                f"go from 0 to {vocab_size - 1}"
            )
    if len(tokens) > context:
        raise UsageError(
            f"the prompt has {len(tokens)} tokens and the artifact's context holds {context}: "
            "shorten it, or compile with a larger --context"
        )
    return tokens


class OneThread:
    """Held by the thread that decodes, as often as it likes. Another one is told so in a
    `BitMTPError`: it might wait for steps that nobody reads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise BitMTPError(
                "another thread is decoding on this engine, which answers one prompt at a time: "
                "read that generation first, or make an engine a thread"
            )

    def __exit__(self, *fault: object) -> None:
        self._lock.release()


class Decoder:
    """One sequence over one session, which may go on in several turns.

    `tokens`: the prompt and what was delivered since, `n` their number. `b`: KV slots [0, b) hold
    the causal K/V of tokens[0:b), and b < n once there are tokens. The device may be ahead of this:
    what it committed and nobody was given does not count.
    """

    def __init__(self, session: TokenSession, times: StepTimes) -> None:
        """`times`: what a step costs in each of the session's buckets."""
        self.session = session
        self.flight = Flight(session)
        self.tokens: list[int] = []
        self.b = 0
        self.one_thread = OneThread()
        self._times = times
        self._policy: tuple[DecodeOptions, Policy] | None = None
        # Weak, as the stream knows its decoder: the two would outlive the engine.
        self._current: weakref.ref[TokenStream] | None = None

    @property
    def n(self) -> int:
        return len(self.tokens)

    def generate(
        self,
        prompt_ids: Sequence[int],
        stop: StopCondition,
        options: DecodeOptions | None = None,
        sampling: SamplingOptions | None = None,
    ) -> "TokenStream":
        """The tokens after `prompt_ids`, delivered as they are read back; the end token too.

        Without `options` one token a step, without `sampling` greedy. The prompt is checked here
        (`check_prompt`), the work is done as the stream is read. The K/V of what the prompt shares
        with the sequence before it are used again. Another generation ends this one.
        """
        if stop.context > self.session.context:
            raise ValueError(f"{stop.context} tokens of context, the session has room for fewer")
        tokens = check_prompt(prompt_ids, self.session.vocab_size, stop.context)
        with self.one_thread:
            self.flight.drain()
            self.b = min(self.b, _common(tokens, self.tokens), len(tokens) - 1)
            self.tokens = tokens
            made = TokenStream(
                self, stop, options or DecodeOptions(), sampling or SamplingOptions()
            )
            self._current = weakref.ref(made)
            return made

    def rewind(self, n: int) -> None:
        """Forget all but the first `n` tokens, and end the generation under way.

        The only way b may fall within a sequence. The device is told when the next one begins.
        """
        if not 0 <= n <= self.n:
            raise ValueError(f"{n} tokens of {self.n} cannot stay")
        with self.one_thread:
            current = self._current and self._current()
            if current:
                current.abandon()
            self.flight.drain()
            self.tokens = self.tokens[:n]
            self.b = max(0, min(self.b, n - 1))

    def is_current(self, stream: "TokenStream") -> bool:
        """Whether no newer generation has taken the sequence over."""
        return self._current is not None and self._current() is stream

    def policy(self, options: DecodeOptions) -> Policy:
        """The policy for `options`, with what it learned while they were the same."""
        if self._policy is None or self._policy[0] != options:
            self._policy = options, Policy(options, self.session.widths, self._times)
        elif options.mode in UNVERIFIED:
            self._policy[1].forget()
        return self._policy[1]

    def prefill(self) -> None:
        """Materialise all but the last token, which is the first pending one."""
        if self.b < self.n - 1:
            self.session.prefill(self.tokens[self.b : self.n - 1], self.b)
            self.b = self.n - 1


class TokenStream(Iterator[int]):
    """The tokens of one generation as they are committed.

    `statistics` and `logprobs` (of the delivered tokens, natural, at temperature 1) grow with it.
    `finish_reason`: "stop", "length" or "cancelled", None while it may go on. Reading on raises
    `BitMTPError` when a newer generation has begun, or when the model gave no finite logit.
    """

    def __init__(
        self,
        decoder: Decoder,
        stop: StopCondition,
        options: DecodeOptions,
        sampling: SamplingOptions,
    ) -> None:
        self.statistics = Statistics(decoder.n, decoder.b)
        self.logprobs: list[float] = []
        self.finish_reason = stop.before(decoder.n)
        self._decoder = decoder
        self._stop = stop
        self._options = options
        self._sampling = sampling
        self._loop: StepLoop | None = None
        self._ready: deque[Committed] = deque()
        self._cancelled = False

    def __next__(self) -> int:
        with self._decoder.one_thread:
            return self._next()

    def _next(self) -> int:
        if not self._cancelled:
            self._check_current()
        while self.finish_reason is None:
            if self._cancelled:
                self.end(CANCELLED)
            elif self._ready:
                return self._deliver()
            else:
                self._advance()
        if self._decoder.is_current(self):
            # The device may still be in steps behind the end.
            self._decoder.flight.drain()
        raise StopIteration

    def cancel(self) -> None:
        """Ask the stream to end as "cancelled" when it is read next; any thread may call this."""
        self._cancelled = True

    def close(self) -> None:
        """End the stream now, as "cancelled" if it has not ended yet."""
        self.end(CANCELLED)

    def end(self, reason: str) -> None:
        """End it behind the tokens that were delivered, with this finish reason."""
        self.finish_reason = self.finish_reason or reason
        if self._decoder.is_current(self):
            self._decoder.rewind(self._decoder.n)

    def abandon(self) -> None:
        """Deliver nothing more: the sequence is rewound."""
        self.finish_reason = self.finish_reason or CANCELLED
        self._decoder.flight.pause()

    def _check_current(self) -> None:
        if not self._decoder.is_current(self):
            raise BitMTPError(
                "this generation was cut off by a newer one on the same engine: read one to its "
                "end before starting the next"
            )

    def _advance(self) -> None:
        """Read the next chunk back."""
        flight = self._decoder.flight
        if self._loop is None:
            self._loop = self._begin()
        self._check_finite(self._loop)
        flight.resume()
        self._loop.fill()
        committed = self._loop.read()
        try:
            # Where the device works by itself, let it, before anybody looks at these tokens.
            if self._decoder.session.depth > 1:
                self._loop.fill()
        finally:
            self._ready.extend(committed)
        if not flight or self._loop.finish != Finish.RUNNING:
            flight.pause()
        if not self._ready:
            self._settle(self._loop)

    def _begin(self) -> StepLoop:
        decoder = self._decoder
        start = time.perf_counter()
        decoder.prefill()
        self.statistics.prefill_seconds += time.perf_counter() - start
        decoder.flight.begin(self.statistics)
        decoder.flight.resume()
        state = first_state(
            decoder.tokens,
            decoder.b,
            self._stop.limit(decoder.n),
            sorted(self._stop.eos_token_ids),
            self._options,
            self._sampling,
        )
        penalised = self._sampling.repetition_penalty != 1
        seen = first_places(decoder.tokens, decoder.session.vocab_size) if penalised else None
        policy = decoder.policy(self._options)
        return StepLoop(decoder.session, decoder.flight, policy, state, seen)

    def _check_finite(self, loop: StepLoop) -> None:
        if loop.finish == Finish.BROKEN:
            raise BitMTPError(
                f"the model gave no finite logit for the token at position "
                f"{int(loop.state[Word.LENGTH])}: its weights are damaged or do not belong to this "
                "program, compile the artifact again"
            )

    def _deliver(self) -> int:
        assert self._loop is not None
        decoder, (token, logprob, kind) = self._decoder, self._ready.popleft()
        decoder.tokens.append(token)
        decoder.b = min(int(self._loop.state[Word.BOUNDARY]), decoder.n - 1)
        self.logprobs.append(logprob)
        self.statistics.count_token(kind)
        if not self._ready:
            self._settle(self._loop)
        return token

    def _settle(self, loop: StepLoop) -> None:
        """All that was read back is delivered."""
        self.statistics.settle(loop.state)
        self.finish_reason = REASONS.get(loop.finish)


def _common(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Tokens at the beginning of both."""
    pairs = zip(tokens, others, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(others)))
