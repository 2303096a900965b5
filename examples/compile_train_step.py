"""Compiles a whole train step into one graph: forward, backward, clipping, optimizer step.

    python examples/compile_train_step.py [--backend aot_eager]

What a step needs for that is said at `train_step`. The learning rate moves, and nothing is compiled
again.
"""

import argparse

import torch
from torch import nn

import torch_gpumode.optim


def train(num_steps: int = 120, backend: str = "inductor") -> float:
    """Returns the last loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch_gpumode.optim.FusedAdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=num_steps)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()  # traced, because of trace_autograd_ops
        optimizer.step(max_norm=1.0)
        optimizer.zero_grad()  # after the step, so that each call begins without gradients
        return loss.detach()  # what has a graph of its own cannot leave

    compiled = torch.compile(train_step, backend=backend, fullgraph=True)
    loss = torch.zeros(())
    with torch._dynamo.config.patch(trace_autograd_ops=True, error_on_recompile=True):
        for step in range(num_steps):
            x = torch.randn(32, 16)
            loss = compiled(x, x.square().mean(1, keepdim=True))
            scheduler.step()  # outside: it sets numbers, which the graph reads when it runs
            if step % 20 == 19:
                norm, rate = optimizer.grad_norm, optimizer.param_groups[0]["lr"]
                print(f"step {step + 1}: loss {loss:.4f}, norm {norm:.3f}, lr {rate:.2g}")
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    train(backend=parser.parse_args().backend)
