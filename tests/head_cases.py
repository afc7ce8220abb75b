"""Tables and activations for the bounded head, plain ones and such that its bound has work."""

from dataclasses import dataclass

import numpy as np
from choose_cases import OPTIONS, state_for

from bitmtp_tvm.reference.head_bound import Request, plain_request
from relax_models.formats import bf16_bits
from relax_models.state import NEVER

ROWS = 16


@dataclass
class HeadCase:
    """x `(ROWS, K)` float32, table `(V, K)` uint16."""

    x: np.ndarray
    table: np.ndarray


def rows_of(rng: np.random.Generator, size: int) -> np.ndarray:
    """Rows as a norm gives them, and zeros, an outlier, small, equal and opposite ones."""
    x = rng.normal(size=(ROWS, size)).astype(np.float32)
    x[1] = 0
    x[2, size // 2] = 300
    x[3] *= np.float32(1e-25)
    x[5] = x[4]
    x[6] = -x[4]
    return x


def cases(rng: np.random.Generator, vocab_size: int, size: int) -> dict[str, HeadCase]:
    """Every kind of table at this shape."""
    plain = rng.normal(size=(vocab_size, size)) * 0.02
    half = vocab_size // 2
    tables = {name: plain.copy() for name in ("plain", "duplicates", "column", "row")}
    tables["duplicates"][half : 2 * half] = plain[:half]
    tables["column"][:, 3] *= 100
    tables["row"][vocab_size // 3] *= 1000
    # All within the bound of each other, and all the same.
    tables["neighbours"] = plain[:1] + rng.normal(size=plain.shape) * 1e-5
    tables["equal"] = np.repeat(plain[:1], vocab_size, axis=0)
    tables["zeros"] = np.zeros_like(plain)
    tables["tiny"], tables["huge"] = plain * 1e-36, plain * 1e32
    x = rows_of(rng, size)
    return {
        name: HeadCase(x, bf16_bits(table.astype(np.float32))) for name, table in tables.items()
    }


def requests(rng: np.random.Generator, vocab_size: int) -> dict[str, Request]:
    """Without a penalty, and with penalties above and below 1 on half of the tokens."""
    found = {"plain": plain_request(ROWS, vocab_size)}
    for name in ("penalty", "reward"):
        seen = np.where(
            rng.random(vocab_size) < 0.5, rng.integers(0, 1000, vocab_size), NEVER
        ).astype(np.int32)
        horizon = rng.integers(0, 1000, ROWS).astype(np.int32)
        found[name] = Request(horizon, state_for(OPTIONS[name], ROWS), seen)
    return found
