"""The forward pass of a checkpoint in PyTorch, a layer at a time, for real shapes on a GPU.

`python tests/torch_reference.py ARTIFACT [--tokens N]` runs a random-weights artifact and compares
its logits with those of the same weights in float32, with int8 activations (what the artifact
computes) and with float activations (what their quantisation costs).
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from bitmtp_tvm.artifact import check_device, open_artifact
from bitmtp_tvm.checkpoint import Checkpoint, random_checkpoint
from bitmtp_tvm.session import Session
from bitmtp_tvm.weights import LowBit, model_tensors, read_matrix, rope_table
from relax_models.config import PRESETS
from relax_models.formats import get_format

GROUP = 128


class TorchReference:
    """`logits` of a causal pass over all tokens at once; `int8` rounds the linears' inputs."""

    def __init__(self, checkpoint: Checkpoint, device: str, int8: bool) -> None:
        self.checkpoint, self.config = checkpoint, checkpoint.config
        self.device, self.int8 = device, int8
        self.form = get_format(self.config.weight_format)
        self.matrices = {t.stem: t for t in model_tensors(self.config) if isinstance(t, LowBit)}

    def logits(self, tokens: np.ndarray) -> torch.Tensor:
        """`(tokens, vocab_size)` float32."""
        config = self.config
        where = torch.tensor(tokens, device=self.device, dtype=torch.long)
        table = self._table()
        h = table[where]
        rope = torch.tensor(rope_table(config, len(tokens)), device=self.device)
        for layer in range(config.num_hidden_layers):
            h = h + self._attention(f"layers.{layer}", h, rope)
            h = h + self._feed_forward(f"layers.{layer}", h)
        h = self._norm("norm", h)
        if config.architecture == "qwen3":
            h = self._rounded(h)
            table = table if config.tie_word_embeddings else self._weight("head")
        return h @ table.T

    def _attention(self, stem: str, h: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        config, rows = self.config, len(h)
        heads, kv = config.num_attention_heads, config.num_key_value_heads
        x = self._linear(f"{stem}.qkv", self._norm(f"{stem}.input_norm", h))
        q, k, v = x.view(rows, -1, config.head_dim).split([heads, kv, kv], dim=1)
        if config.architecture == "qwen3":
            q, k = self._norm(f"{stem}.q_norm", q), self._norm(f"{stem}.k_norm", k)
        q, k = rotated(q, rope), rotated(k, rope).half().float()
        v = v.half().float()
        k, v = (t.repeat_interleave(heads // kv, dim=1) for t in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * config.head_dim**-0.5
        hidden = torch.ones(rows, rows, dtype=torch.bool, device=self.device).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        mixed = torch.einsum("hij,jhd->ihd", weights, v).reshape(rows, -1)
        if config.architecture == "bitnet":
            mixed = self._norm(f"{stem}.attn_sub_norm", mixed)
        return self._linear(f"{stem}.o", mixed)

    def _feed_forward(self, stem: str, h: torch.Tensor) -> torch.Tensor:
        x = self._linear(f"{stem}.gate_up", self._norm(f"{stem}.post_attention_norm", h))
        gate, up = x.chunk(2, dim=-1)
        if self.config.hidden_act == "relu2":
            x = torch.relu(gate).square() * up
        else:
            x = torch.nn.functional.silu(gate) * up
        if self.config.architecture == "bitnet":
            x = self._norm(f"{stem}.ffn_sub_norm", x)
        return self._linear(f"{stem}.down", x)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = torch.tensor(self.checkpoint.dense(name), device=self.device)
        mean = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + self.config.rms_norm_eps) * weight

    def _linear(self, stem: str, x: torch.Tensor) -> torch.Tensor:
        return self._rounded(x) @ self._weight(stem).T

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        """What int8 codes with one scale a row, or a group of columns, leave of x."""
        if not self.int8:
            return x
        parts = x.unflatten(-1, (-1, GROUP)) if self.form.group else x.unsqueeze(-2)
        bound = parts.abs().amax(-1, keepdim=True).clamp(min=1e-5)
        codes = (parts * (127 / bound)).round().clamp(-128, 127)
        return (codes * (bound / 127)).flatten(-2)

    def _weight(self, stem: str) -> torch.Tensor:
        tensor = self.matrices[stem]
        codes, scales = read_matrix(self.checkpoint, tensor, self.form)
        weight = torch.tensor(codes, device=self.device).float()
        weight = weight - 1 if self.form.bits == 2 else 2 * weight - 1
        scales = torch.tensor(scales.astype(np.float32), device=self.device)
        if self.form.group:
            return weight.mul_(scales.repeat_interleave(GROUP, dim=1))
        rows = torch.tensor(tensor.rows, device=self.device)
        return weight.mul_(scales.repeat_interleave(rows)[:, None])

    def _table(self) -> torch.Tensor:
        if "embed" in self.matrices:
            return self._weight("embed")
        bits = torch.tensor(self.checkpoint.dense("embed").view(np.int16), device=self.device)
        return bits.view(torch.bfloat16).float()


def rotated(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotate-half RoPE of x `(rows, heads, head_dim)`."""
    low, high = x.chunk(2, dim=-1)
    cos, sin = rope[:, None, :, 0], rope[:, None, :, 1]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def compare(ours: torch.Tensor, theirs: torch.Tensor) -> dict[str, float]:
    """How far two sets of logits are apart; KL is that of `ours` from `theirs`, mean over rows."""
    p, q = theirs.log_softmax(-1), ours.log_softmax(-1)
    return {
        "largest": (ours - theirs).abs().max().item(),
        "rms_over_std": ((ours - theirs).square().mean().sqrt() / theirs.std()).item(),
        "kl": (p.exp() * (p - q)).sum(-1).mean().item(),
        "same_top1": (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item(),
    }


def artifact_logits(session: Session, tokens: np.ndarray) -> torch.Tensor:
    found = []
    for at in range(0, len(tokens), session.widths[-1]):
        part = tokens[at : at + session.widths[-1]]
        session.decode(part, range(at, at + len(part)), at, None, range(len(part)))
        found.append(torch.tensor(session.logits().copy()))
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--tokens", type=int, default=32)
    arguments = parser.parse_args()
    artifact = open_artifact(arguments.artifact)
    check_device(artifact)
    session = Session(artifact)
    model = artifact.manifest.model
    checkpoint = random_checkpoint(PRESETS[model], name=model)
    tokens = np.random.default_rng(5).integers(0, checkpoint.config.vocab_size, arguments.tokens)
    ours = artifact_logits(session, tokens)
    # Before PyTorch takes memory of its own.
    planned, used = artifact.manifest.memory.total, session.memory_used()
    print(f"{model}: memory planned {planned / 2**20:.0f} MiB, used {used / 2**20:.0f} MiB")
    device = "cuda" if artifact.manifest.kind == "cuda" else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    for name, int8 in (("int8 activations", True), ("float activations", False)):
        begun = time.perf_counter()
        theirs = TorchReference(checkpoint, device, int8).logits(tokens).cpu()
        print(
            model, name, json.dumps(compare(ours, theirs)), f"{time.perf_counter() - begun:.0f} s"
        )


if __name__ == "__main__":
    main()
