"""Run by torchrun: what is sharded gives what is whole.

Muon's steps, also where rows of matrices do not divide, and a model's gradients with its parameters
gathered at once and layer by layer.
"""

import torch
import torch.distributed as dist
from test_bitmtp_tvm_training_optimizers import Matrices
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from bitmtp_tvm.training.model import TrainableDecoder
from bitmtp_tvm.training.objective import Objective, Weights, counts, pack
from bitmtp_tvm.training.optimizers import muon
from bitmtp_tvm.training.options import TrainOptions
from bitmtp_tvm.training.parallel import share, world
from relax_models.config import ModelConfig

SHAPES = [(33, 32), (33, 32), (24, 40), (1, 16)]


CONFIG = {
    **{"architecture": "bitnet", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
    **{"rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 64},
    **{"hidden_act": "relu2", "tie_word_embeddings": True},
}


def made():
    model = TrainableDecoder(ModelConfig.from_dict(CONFIG))
    model.initialise(0)
    return Objective(model, Weights())


def check_gradients(here):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 96, (1, 33), generator=generator)
    batch = pack(tokens, torch.tensor([[3, 20]]), 4, "causal", mask_token_id=2)
    divisors = counts(batch, Weights())
    whole = made()
    whole(batch, divisors)[0].backward()
    for most in (0, 1 << 30):
        sharded = share(made(), here, most)
        groups = [m for m in sharded.modules() if isinstance(m, FSDPModule)]
        assert len(groups) == (1 if most else 1 + CONFIG["num_hidden_layers"])
        sharded(batch, divisors)[0].backward()
        for one, two in zip(whole.parameters(), sharded.parameters(), strict=True):
            # All processes had the same batch, and gradients are averaged.
            assert torch.allclose(one.grad, two.grad.full_tensor(), atol=1e-6)


def check_muon():
    torch.manual_seed(0)
    whole, sharded = Matrices(SHAPES), Matrices(SHAPES)
    sharded.load_state_dict(whole.state_dict())
    fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    options = TrainOptions(lr=0.01, weight_decay=0.3)
    optimizers = [muon(model, options, fused=False) for model in (whole, sharded)]
    for _ in range(3):
        for one, two in zip(whole.parameters(), sharded.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            two.grad = torch.distributed.tensor.distribute_tensor(
                one.grad, two.device_mesh, two.placements
            )
        for both in optimizers:
            for optimizer in both:
                optimizer.step()
    for one, two in zip(whole.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(one, two.full_tensor())


def main():
    with world("cpu") as here:
        check_muon()
        check_gradients(here)


if __name__ == "__main__":
    main()
