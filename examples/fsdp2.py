"""Trains a model whose parameters, gradients and optimizer states are sharded, and saves it.

    torchrun --nproc-per-node=4 examples/fsdp2.py --out checkpoint
    torchrun --nproc-per-node=2 examples/fsdp2.py --out checkpoint --resume

The checkpoint is one that any number of ranks can load: each takes the parts that are its own.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import torch_gpumode.optim


def make_model() -> nn.Module:
    torch.manual_seed(0)  # all ranks begin with the same
    layers = [nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)]
    model = nn.Sequential(*layers)
    for module in (*layers[::2], model):
        fully_shard(module)
    return model


def train(num_steps: int, out: str | None, resumes: bool) -> float:
    """Returns the last loss, averaged over the ranks."""
    model = make_model()
    # After fully_shard, so that it gets the shards: one launch updates all of this rank's.
    optimizer = torch_gpumode.optim.FusedAdamW(model.parameters(), lr=1e-2)
    first = 0
    if resumes:
        weights, states = get_state_dict(model, optimizer)
        saved: dict[str, Any] = {"model": weights, "optimizer": states, "step": torch.tensor(0)}
        dcp.load(saved, checkpoint_id=out)
        set_state_dict(
            model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )
        first = int(saved["step"])
    loss = torch.zeros(())
    for step in range(first, first + num_steps):
        batch = torch.randn(48, 16, generator=torch.Generator().manual_seed(step))
        x = batch.tensor_split(dist.get_world_size())[dist.get_rank()]
        loss = nn.functional.mse_loss(model(x), x.square().mean(1, keepdim=True))
        loss.backward()
        optimizer.step(max_norm=1.0)  # the norm is that of whole gradients, over all ranks
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {loss:.4f}, norm {optimizer.grad_norm:.3f}", flush=True)
    if out is not None:
        weights, states = get_state_dict(model, optimizer)
        last = torch.tensor(first + num_steps)
        dcp.save({"model": weights, "optimizer": states, "step": last}, checkpoint_id=out)
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return float(mean)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", help="folder of the checkpoint")
    parser.add_argument("--resume", action="store_true", help="begin with what --out has")
    args = parser.parse_args()
    if args.resume and args.out is None:
        parser.error("--resume needs --out: the folder of the checkpoint to begin with")
    dist.init_process_group(backend="gpumode")
    loss = train(args.steps, args.out, args.resume)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks: loss {loss:.6f} at the end")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
