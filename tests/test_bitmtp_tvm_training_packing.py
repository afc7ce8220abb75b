"""One packed forward against the plain ones that it stands for, and the two kinds of mask."""

from dataclasses import replace

import pytest
import torch
from tiny_training import BITNET, BOS, EOS, MASK, QWEN3, causal, model_of
from torch.nn import functional

from bitmtp_tvm.training.measures import batch_sums, measures_of
from bitmtp_tvm.training.model import attend
from bitmtp_tvm.training.objective import Heads, Weights, joint_loss
from bitmtp_tvm.training.packing import FLEX_BLOCK, document_numbers, pack

KINDS = ("causal", "bidirectional")
LENGTH, BLOCK = 30, 3
ANCHORS = torch.tensor([[0, 7, 26], [3, 4, 19]])


def text(batch=2, length=LENGTH + 1, seed=0):
    """Random tokens, in which the second sequence begins a new document at 12."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, BOS, (batch, length), generator=generator)
    tokens[:, 0] = BOS
    tokens[1:, 11], tokens[1:, 12] = EOS, BOS
    return tokens


def packed_of(tokens, anchors=ANCHORS, kind="causal", flex=False, block=BLOCK):
    documents = document_numbers(tokens, BOS, EOS)
    return pack(tokens, anchors, block, kind, mask_token_id=MASK, documents=documents, flex=flex)


def hidden_of(model, packed):
    with torch.no_grad():
        return model(packed.tokens, packed.positions, packed.mask)


def alone(model, tokens, positions, mask):
    with torch.no_grad():
        return model(torch.tensor([tokens]), torch.tensor([positions]), mask)[0]


@pytest.fixture
def exact_sums(monkeypatch):
    """Sums of floats in float64: their order hangs on how many rows there are, on some processors
    more than on others, and a last bit now and then moves a rounding to int8."""

    def exact_attend(q, k, v, mask):
        return attend(q.double(), k.double(), v.double(), mask).to(q.dtype)

    def exact_linear(x, weight):
        return (x.double() @ weight.double().T).to(x.dtype)

    monkeypatch.setattr("bitmtp_tvm.training.model.attend", exact_attend)
    monkeypatch.setattr("torch.nn.functional.linear", exact_linear)


@pytest.mark.parametrize(("config", "quant"), [(BITNET, None), (QWEN3, "ternary-g128")])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("exact_sums")
def test_every_row_is_what_a_forward_of_its_own_gives(config, quant, kind):
    model, tokens = model_of(config, quant), text()
    hidden = hidden_of(model, packed_of(tokens, kind=kind))
    starts = [[0] * LENGTH, [0] * 12 + [12] * (LENGTH - 12)]
    for b in range(2):
        for first in sorted(set(starts[b])):
            rows = [i for i in range(LENGTH) if starts[b][i] == first]
            plain = alone(model, tokens[b, rows].tolist(), rows, causal(len(rows)))
            assert torch.allclose(hidden[b, rows], plain, atol=1e-5, rtol=0)
        for a, anchor in enumerate(ANCHORS[b].tolist()):
            before = list(range(starts[b][anchor], anchor + 1))
            row = [*tokens[b, before].tolist(), *[MASK] * BLOCK]
            places = [*before, *range(anchor + 1, anchor + 1 + BLOCK)]
            mask = causal(len(row)).clone()
            if kind == "bidirectional":
                mask[..., len(before) :, len(before) :] = True
            naive = alone(model, row, places, mask)[len(before) :]
            block = hidden[b, LENGTH + a * BLOCK : LENGTH + (a + 1) * BLOCK]
            assert torch.allclose(block, naive, atol=1e-5, rtol=0)


def test_mask_rows_change_no_clean_row_by_a_bit():
    model, tokens = model_of(BITNET), text()
    one = hidden_of(model, packed_of(tokens))[:, :LENGTH]
    other = replace(packed_of(tokens), tokens=packed_of(tokens).tokens.clone())
    other.tokens[:, LENGTH:] = 17
    assert torch.equal(one, hidden_of(model, other)[:, :LENGTH])


def test_targets_are_the_tokens_behind_and_count_inside_one_document():
    tokens = text()
    packed = packed_of(tokens)
    assert torch.equal(packed.ntp_targets, tokens[:, 1:])
    assert packed.ntp_weights[0].all()
    # The new document's bos is no continuation of the old one.
    assert torch.equal(torch.nonzero(packed.ntp_weights[1] == 0)[:, 0], torch.tensor([11]))
    for b, a, j in [(0, 0, 0), (0, 2, 2), (1, 1, 1)]:
        anchor = int(ANCHORS[b, a])
        assert packed.mask_targets[b, a, j] == tokens[b, anchor + j + 2]
        assert packed.teachers[b, a, j] == anchor + j + 1
        row = LENGTH + a * BLOCK + j
        assert packed.positions[b, row] == anchor + j + 1
        assert packed.tokens[b, row] == MASK
    late = packed_of(tokens, torch.tensor([[0, 1, 2], [8, 9, 10]])).mask_weights
    assert late[1].tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 0]]


def test_without_a_bos_a_document_begins_behind_an_eos():
    tokens = torch.tensor([[5, EOS, 6, 7, EOS, 8]])
    assert document_numbers(tokens, None, EOS).tolist() == [[0, 0, 1, 1, 1, 2]]
    assert document_numbers(tokens, None, None).tolist() == [[0] * 6]


@pytest.mark.parametrize("kind", KINDS)
def test_the_two_masks_are_the_same(kind):
    tokens = text(2, 2 * FLEX_BLOCK + 1)
    generator = torch.Generator().manual_seed(1)
    anchors = torch.randint(0, 240, (2, 32), generator=generator).sort().values
    dense, flex = (packed_of(tokens, anchors, kind, flex, 8).mask for flex in (False, True))
    total = dense.shape[-1]
    rows, columns = torch.arange(total)[:, None], torch.arange(total)[None, :]
    for b in range(2):
        assert torch.equal(flex.mask_mod(b, 0, rows, columns), dense[b, 0])
    tiles = dense.view(2, 4, FLEX_BLOCK, 4, FLEX_BLOCK).transpose(2, 3).flatten(3)
    listed = flex.to_dense()[:, 0].bool()
    assert not (tiles.any(-1) & ~listed).any(), "a block that holds something is not listed"
    # Only what the bounds of 128 rows cannot tell apart is listed for nothing.
    assert (listed & ~tiles.any(-1)).sum() <= 2
    full = flex.full_kv_num_blocks
    assert full.sum() == tiles.all(-1).sum()


def test_flex_attention_gives_what_the_dense_mask_gives():
    tokens = text(1, FLEX_BLOCK + 1, seed=4)
    anchors = torch.arange(0, 112, 7)[None]
    dense, flex = (packed_of(tokens, anchors, "causal", flex, 8).mask for flex in (False, True))
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 2 * FLEX_BLOCK, 16) for heads in (4, 2, 2))
    assert torch.allclose(attend(q, k, v, flex), attend(q, k, v, dense), atol=1e-5)


@pytest.mark.parametrize(
    ("length", "count", "reason"),
    [(30, 32, "30 clean and 256 mask"), (128, 3, "24 mask rows")],
)
def test_blocks_of_128_need_whole_blocks(length, count, reason):
    tokens = torch.zeros(1, length + 1, dtype=torch.long)
    with pytest.raises(ValueError, match=reason):
        packed_of(tokens, torch.zeros(1, count, dtype=torch.long), flex=True, block=8)


def test_a_block_needs_room():
    with pytest.raises(ValueError, match="no room"):
        packed_of(torch.zeros(1, 4, dtype=torch.long), torch.tensor([[0]]))


@pytest.mark.parametrize("share", [0.5, 0.0, 1.0])
def test_the_loss_is_the_formula(share):
    model, tokens = model_of(BITNET), text()
    packed = packed_of(tokens)
    hidden = hidden_of(model, packed)
    with torch.no_grad():
        logits = model.logits(hidden).log_softmax(-1)
    clean = logits[:, :LENGTH]
    ce = -clean.gather(-1, tokens[:, 1:, None])[..., 0]
    ntp = (ce * packed.ntp_weights).sum() / packed.ntp_weights.sum()
    over = under = 0.0
    for b in range(2):
        for a in range(3):
            for j in range(BLOCK):
                weight = packed.mask_weights[b, a, j] * 0.85**j
                q = logits[b, LENGTH + a * BLOCK + j]
                p = clean[b, ANCHORS[b, a] + j + 1]
                one = -q[tokens[b, ANCHORS[b, a] + j + 2]]
                two = functional.kl_div(q, p, log_target=True, reduction="sum")
                over += weight * ((1 - share) * one + share * two)
                under += weight
    losses = joint_loss(model, packed, Weights(0.7, 0.85, share))
    assert losses.total.item() == pytest.approx(float(ntp + 0.7 * over / under), rel=1e-5)
    assert losses.ntp.item() == pytest.approx(float(ntp), rel=1e-5)
    losses.total.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_the_teacher_gets_no_gradient():
    model = model_of(BITNET)
    hidden, teachers = (torch.randn(1, 6, 40, requires_grad=True) for _ in range(2))
    targets = torch.arange(6).view(1, 2, 3)
    sums = Heads(model).masks(hidden, teachers, targets, torch.ones(1, 2, 3))
    sums[1].backward()
    assert hidden.grad.abs().sum() > 0
    assert teachers.grad is None


def test_pieces_of_the_rows_sum_up_to_all_of_them(monkeypatch):
    model, packed = model_of(BITNET), packed_of(text())
    whole = joint_loss(model, packed, Weights())
    monkeypatch.setattr("bitmtp_tvm.training.objective._LOGITS", 259 * 7)
    pieces = joint_loss(model, packed, Weights())
    assert pieces.total.item() == pytest.approx(whole.total.item(), rel=1e-5)
    assert pieces.mask_kl.item() == pytest.approx(whole.mask_kl.item(), rel=1e-4)


def test_no_anchors_is_the_next_token_alone():
    model, tokens = model_of(BITNET), text()
    packed = packed_of(tokens, torch.zeros(2, 0, dtype=torch.long))
    assert packed.tokens.shape == (2, LENGTH)
    losses = joint_loss(model, packed, Weights())
    assert losses.total.item() == losses.ntp.item()
    assert losses.mask_ce.item() == 0
    measures = measures_of(batch_sums(model, packed))
    assert measures.ntp_loss == pytest.approx(losses.ntp.item(), rel=1e-5)
    assert (measures.accuracy, measures.accepted_length) == ((), 1)


def test_measures_count_what_they_say():
    model, tokens = model_of(BITNET), text()
    packed = packed_of(tokens)
    with torch.no_grad():
        named = model.logits(hidden_of(model, packed)).argmax(-1)
    # The text that the model would have written in the first block of the first sequence.
    tokens[0, 1 : 2 + BLOCK] = torch.cat([named[0, :1], named[0, LENGTH : LENGTH + BLOCK]])
    mask = replace(packed, ntp_targets=tokens[:, 1:], mask_targets=packed.mask_targets.clone())
    mask.mask_targets[0, 0] = named[0, LENGTH : LENGTH + BLOCK]
    measures = measures_of(batch_sums(model, mask))
    guess = named[:, LENGTH:].view(2, 3, BLOCK)
    known = named[:, :LENGTH].gather(1, mask.teachers.flatten(1)).view_as(guess)
    rows = mask.mask_weights.sum((0, 1))
    right = ((guess == mask.mask_targets) * mask.mask_weights).sum((0, 1)) / rows
    same = ((guess == known) * mask.mask_weights).sum((0, 1)) / rows
    assert measures.accuracy == pytest.approx(right.tolist())
    assert measures.agreement == pytest.approx(same.tolist())
    assert measures.accepted_length >= 1 + (1 / rows).sum().item() - 1e-6
