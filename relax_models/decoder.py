"""The entry functions that every architecture offers, over its own layers, embedding and head."""

from tvm import IRModule
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, spec

from relax_models.layers import Rows, greedy


class Decoder(nn.Module):
    """A decoder: `decode` gives logits for the rows that ask, `prefill` only fills the cache.

    A subclass sets `rope` (a RopeTable) and `layers` (each with `forward` and `write_kv`), and
    defines `embedded` and `logits`.
    """

    def embedded(self, tokens: Tensor) -> Tensor:
        """Hidden states `(width, hidden_size)` float32 of tokens `(width,)` int32."""
        raise NotImplementedError

    def logits(self, h: Tensor, logit_rows: Tensor) -> Tensor:
        """Logits `(rows, vocab_size)` float32 of the rows of h `(width, hidden_size)` that ask."""
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
        rows = Rows(tokens, position, boundary, visible)
        h = self.embedded(tokens)
        for layer in self.layers:
            h = layer(h, rows, self.rope.table)
        logits = self.logits(h, logit_rows)
        return logits, greedy(logits, logit_rows)

    def prefill(self, tokens: Tensor, position: Tensor, boundary: Tensor) -> Tensor:
        """Fill the cache for a causal chunk; the last layer stops at its k and v."""
        rows = Rows(tokens, position, boundary, None)
        h = self.embedded(tokens)
        *inner, last = list(self.layers)
        for layer in inner:
            h = layer(h, rows, self.rope.table)
        return last.write_kv(h, rows, self.rope.table)[1]

    def export(self) -> tuple[IRModule, list[str]]:
        """The Relax module with `decode` and `prefill` over symbolic dims `width` and `rows`, and
        the names of the parameters that follow the inputs in both (KV caches end in `.kv.cache`).
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
        plain = {"param_mode": "plain", "effect_mode": "none"}
        mod, params = self.export_tvm(
            {"decode": {**rows, **asked, "$": plain}, "prefill": {**rows, "$": plain}}
        )
        return mod, [name for name, _ in params]
