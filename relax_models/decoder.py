"""The entry functions that every architecture offers, over its own layers, embedding and head."""

from tvm import IRModule
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, spec

from relax_models.layers import Choice, Rows, accept, choose, greedy, lay_out
from relax_models.state import RING, RING_ROWS, STATE_WORDS


class Decoder(nn.Module):
    """A decoder: `step` drafts, verifies and commits on the device, `decode` gives logits for the
    rows that ask, `prefill` only fills the cache.

    A subclass sets `vocab_size`, `rope` (a RopeTable) and `layers` (each with `forward` and
    `write_kv`), and defines `embedded` and `logits`.
    """

    vocab_size: int

    def embedded(self, tokens: Tensor) -> Tensor:
        """Hidden states `(width, hidden_size)` float32 of tokens `(width,)` int32."""
        raise NotImplementedError

    def logits(self, h: Tensor, logit_rows: Tensor, choice: Choice | None = None) -> Tensor:
        """Logits `(rows, vocab_size)` float32 of the rows of h `(width, hidden_size)` that ask.

        The largest score of a row is exact: of its logits after the penalty that `choice` tells of.
        """
        raise NotImplementedError

    def decode(
        self,
        tokens: Tensor,
        position: Tensor,
        boundary: Tensor,
        visible: Tensor,
        logit_rows: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """One step of up to 64 rows -> logits `(rows, vocab_size)`, greedy tokens `(rows,)`."""
        logits = self._forward(Rows(tokens, position, boundary, visible), logit_rows)
        return logits, greedy(logits, logit_rows)

    def _forward(self, rows: Rows, logit_rows: Tensor, choice: Choice | None = None) -> Tensor:
        h = self.embedded(rows.tokens)
        for layer in self.layers:
            h = layer(h, rows, self.rope.table)
        return self.logits(h, logit_rows, choice)

    def step(
        self,
        state: Tensor,
        ring: Tensor,
        seen: Tensor,
        tokens: Tensor,
        position: Tensor,
        boundary: Tensor,
        visible: Tensor,
        logit_rows: Tensor,
        horizon: Tensor,
    ) -> Tensor:
        """One step of the decode loop; returns the state.

        state, ring and seen (see relax_models/state.py) are changed in place. The others are the
        bucket's buffers for its rows, as `step_ops.step_rows` fills them.
        """
        buffers = [tokens, position, boundary, visible, logit_rows, horizon]
        state, laid_out = lay_out(state, buffers)
        *rows, logit_rows, horizon = laid_out
        choice = Choice(horizon, state, seen)
        logits = self._forward(Rows(*rows), logit_rows, choice)
        chosen = choose(logits, logit_rows, choice)
        return accept(chosen, state, ring, seen)

    def prefill(self, tokens: Tensor, position: Tensor, boundary: Tensor) -> Tensor:
        """Fill the cache for a causal chunk; the last layer stops at its k and v."""
        rows = Rows(tokens, position, boundary, None)
        h = self.embedded(tokens)
        *inner, last = list(self.layers)
        for layer in inner:
            h = layer(h, rows, self.rope.table)
        return last.write_kv(h, rows, self.rope.table)[1]

    def export(self) -> tuple[IRModule, list[str]]:
        """The Relax module with `step`, `decode` and `prefill` over symbolic dims `width` and
        `rows`, and the names of the parameters that follow the inputs in all three (KV caches end
        in `.kv.cache`).
        """
        rows = {
            "tokens": spec.Tensor(["width"], "int32"),
            "position": spec.Tensor(["width"], "int32"),
            "boundary": spec.Tensor([1], "int32"),
        }
        asked = {
            "visible": spec.Tensor(["width", 2], "uint32"),
            "logit_rows": spec.Tensor(["rows"], "int32"),
        }
        loop = {
            "state": spec.Tensor([STATE_WORDS], "int32"),
            "ring": spec.Tensor([RING_ROWS, RING], "int32"),
            "seen": spec.Tensor([self.vocab_size], "int32"),
        }
        step = {
            **loop,
            **rows,
            "visible": asked["visible"],
            "logit_rows": spec.Tensor(["width"], "int32"),
            "horizon": spec.Tensor(["width"], "int32"),
        }
        plain = {"param_mode": "plain", "effect_mode": "none"}
        mod, params = self.export_tvm(
            {
                "step": {**step, "$": plain},
                "decode": {**rows, **asked, "$": plain},
                "prefill": {**rows, "$": plain},
            }
        )
        return mod, [name for name, _ in params]
