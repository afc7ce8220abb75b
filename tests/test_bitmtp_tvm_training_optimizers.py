"""Muon for many matrices at once does what PyTorch's does to one after another."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from imports import ROOT
from torch import nn

from bitmtp_tvm.training.optimizers import muon, orthogonal
from bitmtp_tvm.training.options import TrainOptions

SHAPES = [(64, 32), (64, 32), (32, 64), (48, 48), (48, 48)]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Matrices(nn.Module):
    def __init__(self, shapes=SHAPES):
        super().__init__()
        self.some_norm = nn.LayerNorm(8)
        for i, (rows, columns) in enumerate(shapes):
            setattr(self, f"m{i}_proj", nn.Linear(columns, rows, bias=False))

    def matrices(self):
        return [p for name, p in self.named_parameters() if "_proj" in name]


def test_steps_are_those_of_pytorchs_muon():
    torch.manual_seed(0)
    ours, theirs = Matrices(), Matrices()
    theirs.load_state_dict(ours.state_dict())
    before = copy.deepcopy(ours.matrices())
    options = TrainOptions(lr=0.01, weight_decay=0.3)
    one, _ = muon(ours, options, fused=False)
    two = torch.optim.Muon(
        theirs.matrices(), lr=0.01, weight_decay=0.3, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(4):
        for i, (p, q) in enumerate(zip(ours.matrices(), theirs.matrices(), strict=True)):
            # A matrix without a gradient, as of a part that a batch did not reach, stays.
            p.grad = None if (i, step) == (1, 2) else torch.randn_like(p)
            q.grad = None if p.grad is None else p.grad.clone()
        one.step()
        two.step()
    for p, q, start in zip(ours.matrices(), theirs.matrices(), before, strict=True):
        moved = (q - start).abs().max()
        assert moved > 0.01
        assert (p - q).abs().max() < 0.01 * moved


@pytest.mark.parametrize("shape", [(3, 40, 24), (3, 24, 40)])
def test_orthogonal_matrices_have_singular_values_near_one(shape):
    torch.manual_seed(0)
    found = orthogonal(torch.randn(shape), COEFFICIENTS, 5).float()
    values = torch.linalg.svdvals(found)
    assert found.shape == shape
    # The iteration spreads them between about 0.7 and 1.2; those of the input go from 1.5 to 11.
    assert values.min() > 0.6 and values.max() < 1.3


@pytest.mark.parametrize("processes", [2, 3])
def test_what_is_sharded_gives_what_is_whole(processes):
    """Muon's steps and gradients; processes behind the first have nothing of the matrix with one
    row."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [sys.executable, *launch, ROOT / "tests" / "sharded.py"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
