"""Requests for the decode step: drawn ones, and the few that named tests are made of."""

from dataclasses import replace

from decode_oracle import Choice, Request
from fake_model import (
    VOCAB,
    FakeModel,
    ending,
    hashed,
    right,
    right_but_unsure,
    wrong,
    wrong_at,
)
from hypothesis import strategies as st
from step_engine import Engine, Ride, apply, first_state, set_floats

from relax_models.state import Finish, Ring, Word

END = VOCAB - 2
MODES = ("ar", "confidence", "speculative", "hybrid")
DRAFTING = ("speculative", "hybrid")
PROMPT = (3, 4, 5)
WIDE = Choice(width=64, masks=4)


@st.composite
def qualities(draw):
    kind = draw(st.sampled_from(["right", "wrong", "unsure", "places", "hashed", "ends"]))
    if kind == "places":
        return wrong_at(draw(st.sets(st.integers(0, 7), min_size=1)))
    if kind in ("hashed", "ends"):
        made = hashed(draw(st.integers(0, 99)), draw(st.sampled_from([0.4, 0.8, 0.95])))
        ends = draw(st.sets(st.integers(2, 30), max_size=6))
        return ending(END, ends, made) if kind == "ends" else made
    return {"right": right, "wrong": wrong, "unsure": right_but_unsure}[kind]


@st.composite
def choices(draw, block, bidirectional):
    masks = st.sampled_from([0, block]) if bidirectional else st.integers(0, block)
    return Choice(
        width=draw(st.integers(0, 9)),  # Which one of the engine's widths.
        layout=draw(st.sampled_from(["chain", "outcomes"])),
        masks=draw(st.just(block) | masks),
        most_drafts=draw(st.just(9) | st.integers(0, 9)),
        most_chain=draw(st.just(9) | st.integers(0, 9)),
    )


@st.composite
def cases(draw, modes=MODES):
    """A model, a request and what each step runs."""
    block, bidirectional = draw(st.integers(1, 8)), draw(st.booleans())
    prompt = tuple(draw(st.lists(st.integers(0, END), min_size=1, max_size=5)))
    limit = len(prompt) + draw(st.integers(15, 40) | st.integers(1, 10))
    places = st.integers(len(prompt), limit)
    script = dict.fromkeys(draw(st.sets(places, max_size=2)), END)
    if draw(st.integers(0, 9)) == 9:
        script[draw(places)] = -1
    model = FakeModel(
        block_size=block, bidirectional=bidirectional, quality=draw(qualities()), script=script
    )
    some_stops = st.sampled_from([frozenset([END]), frozenset([END, 7, 11])])
    request = Request(
        prompt,
        limit,
        mode=draw(st.sampled_from(modes)),
        min_chain=draw(st.integers(1, block)),
        threshold=draw(st.sampled_from([0.9, 0.5, 0.98])),
        draft_threshold=draw(st.sampled_from([0.5, 0.1, 0.9])),
        stops=draw(st.just(frozenset()) | some_stops),
        bidirectional=bidirectional,
        penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
    )
    steps = draw(st.lists(choices(block, bidirectional), min_size=1, max_size=4))
    return model, request, steps


def at_widths(steps, ops):
    """The choices at widths that the engine has, and a wide one, so that no sequence is stuck."""
    made = [replace(step, width=ops.widths[step.width % len(ops.widths)]) for step in steps]
    return [*made, replace(steps[0], width=64)]


def truth(model, request):
    """What one token at a time gives, off the model's own sequence."""
    tokens = model.continuation(request.prompt, request.limit - len(request.prompt))
    ends = [place for place, token in enumerate(tokens) if token in request.stops]
    return tokens[: ends[0] + 1] if ends else tokens


def ride(ops, quality=right, *, script=None, block=4, context=64, bidirectional=False, **request):
    model = FakeModel(
        context=context,
        block_size=block,
        bidirectional=bidirectional,
        quality=quality,
        script=script,
    )
    stops = frozenset([END]) if script else frozenset()
    given_request = {"prompt": PROMPT, "limit": 40, "stops": stops} | request
    return Ride(ops, model, Request(bidirectional=bidirectional, **given_request))


def placed(*positions):
    """A sequence whose end tokens stand at `positions` and nowhere else."""
    return {place: place % END for place in range(64)} | dict.fromkeys(positions, END)


def confident_in(count):
    """Right; the first `count` of a block with 0.97, the rest with 0.7."""
    return lambda position, offset, token: (token, 0.97 if offset < count else 0.7)


def broken_at(position):
    """Right, but the mask row that proposes the token at `position` has no finite logit."""
    return lambda at, offset, token: (-1, 0.0) if at == position else (token, 0.99)


def draw_tokens(ops, mode, seed, choice):
    """A request of 24 tokens at temperature 0.8, and the state at its end."""
    request = Request(PROMPT, 27, mode=mode)
    model = FakeModel(block_size=4, sharpness=0.4)
    model.prefill(PROMPT[:-1], 0)
    state = first_state(request, model.mask_token)
    state[Word.SEED_LOW] = seed
    set_floats(state, temperature=0.8)
    apply(choice, state)
    engine = Engine(ops, model)
    engine.write(state)
    engine.run(choice.width, 24)
    state, ring = engine.read()
    assert state[Word.FINISH] == Finish.LENGTH
    return ring[Ring.TOKEN, 3:27].tolist(), state


def same_but_for_the_step_under_way(before, after):
    """Whether a step that did nothing changed nothing else."""
    one, other = before.copy(), after.copy()
    for state in one, other:
        state[Word.ROW_PENDING : Word.ROW_BLOCKS + 1] = 0
        state[Word.IDLE] = 0
    return (one == other).all()
