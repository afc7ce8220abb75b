"""Run by torchrun: Muon over matrices that FSDP2 shards, also where their rows do not divide."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bitmtp_tvm.training.optimizers import muon
from bitmtp_tvm.training.options import TrainOptions

SHAPES = [(33, 32), (33, 32), (24, 40), (1, 16)]


class Matrices(nn.Module):
    def __init__(self):
        super().__init__()
        self.some_norm = nn.LayerNorm(8)
        for i, (rows, columns) in enumerate(SHAPES):
            setattr(self, f"m{i}_proj", nn.Linear(columns, rows, bias=False))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    whole, sharded = Matrices(), Matrices()
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
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
