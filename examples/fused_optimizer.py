"""Trains a small model with a fused optimizer in place of torch.optim's.

    python examples/fused_optimizer.py [--attach]

The comments "was:" show what changes in a program that used torch.optim.
"""

import argparse

import torch
from torch import nn

import torch_gpumode.optim


def model_and_data() -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    inputs = torch.randn(40, 32, 16)
    return model, [(x, x.square().mean(1, keepdim=True)) for x in inputs]


def train(num_epochs: int = 3) -> float:
    """Returns the last epoch's mean loss."""
    model, data = model_and_data()
    # was: torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = torch_gpumode.optim.FusedAdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_epochs)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    mean_loss = 0.0
    for _ in range(num_epochs):
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            # was: scaler.unscale_(optimizer); clip_grad_norm_(model.parameters(), 1.0);
            #      scaler.step(optimizer)
            optimizer.step(max_norm=1.0, scaler=scaler)
            scaler.update()
            losses.append(loss.detach())
        scheduler.step()
        mean_loss = torch.stack(losses).mean().item()
        print(f"loss {mean_loss:.4f}, norm of the last gradient {optimizer.grad_norm:.3f}")
    return mean_loss


def train_attached(num_epochs: int = 3) -> float:
    """The same without clipping and scaling: backward makes the step, and frees gradients."""
    model, data = model_and_data()
    optimizer = torch_gpumode.optim.FusedAdamW(model.parameters(), lr=3e-3)
    mean_loss = 0.0
    with torch_gpumode.optim.attach(optimizer, model):
        for _ in range(num_epochs):
            losses = []
            for x, y in data:
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                losses.append(loss.detach())
            mean_loss = torch.stack(losses).mean().item()
            print(f"loss {mean_loss:.4f}")
    return mean_loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attach", action="store_true", help="make the steps inside backward")
    train_attached() if parser.parse_args().attach else train()
