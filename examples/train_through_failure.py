"""Train a small GPT on 4 ranks, kill some of them in their backward passes, and train on.

    torchrun --nproc-per-node=4 -m torch_gpumode.run examples/train_through_failure.py --kills 2

The data are the bytes of Python's own standard library. Gradients are averaged by retried ops: when
a rank is lost, the others agree who is left and average again without it, and `backward()` returns
as if nothing had happened. All that this takes is `average_gradients`, eight lines; the rest is
ordinary DDP. `--kills 0` is the same run undisturbed.
"""

import argparse
import hashlib
import json
import math
import os
import random
import signal
import statistics
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm

import torch_gpumode.distributed as gd

CONTEXT = 128  # bytes that the model sees
BATCH = 12  # windows per step; those who are left share them
WIDTH, DEPTH, HEADS = 192, 3, 6
PEAK_LR, WARMUP_STEPS = 2e-3, 30


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, width] in and out
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Predicts the next byte: [batch, time] of bytes to [batch, time, 256] of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.byte(tokens) + self.position(positions)
        return self.head(self.norm(self.blocks(x)))


def as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def load_bytes() -> tuple[Tensor, Tensor]:
    """The standard library's source for training, and every 20th of its files for validation."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(f for f in root.rglob("*.py") if "site-packages" not in f.parts)
    held_out = b"".join(f.read_bytes() for f in files[::20])
    training = b"".join(f.read_bytes() for i, f in enumerate(files) if i % 20)
    return as_tensor(training), as_tensor(held_out)


def sample(data: Tensor, seed: int, batch: int) -> tuple[Tensor, Tensor]:
    """`batch` random windows: inputs and targets, each [batch, CONTEXT]."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - CONTEXT - 1, (batch,), generator=generator)
    windows = torch.stack([data[i : i + CONTEXT + 1] for i in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def validate(model: nn.Module, data: Tensor) -> float:
    return loss_of(model, *sample(data, seed=0, batch=32)).item()


def learning_rate(step: int, steps: int) -> float:
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    return PEAK_LR * warmup * (0.55 + 0.45 * math.cos(math.pi * step / steps))


@dataclass
class Log:
    """What happened; moments in seconds of the host's monotonic clock."""

    losses: dict[int, float] = field(default_factory=dict)  # by step, nats per byte
    validation: dict[int, float] = field(default_factory=dict)
    went_on: dict[int, float] = field(default_factory=dict)  # by how many are left: the moment
    kills: list[int] = field(default_factory=list)  # steps


def average_gradients(log: Log, bucket: dist.GradBucket) -> Future[Tensor]:
    """DDP's hook for each bucket of gradients: the mean over all ranks that are left."""
    ranks = dist.get_world_size()
    gd.all_reduce(bucket.buffer(), dist.ReduceOp.AVG)
    if dist.get_world_size() < ranks:
        log.went_on[dist.get_world_size()] = time.monotonic()
    done: Future[Tensor] = Future()
    done.set_result(bucket.buffer())
    return done


def my_share(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """What this rank does of a batch that is the same on all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return inputs[rank::ranks], targets[rank::ranks]


def train_step(model: DDP, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> float:
    """One step on all ranks; their mean loss."""
    optimizer.zero_grad()
    loss = loss_of(model, *my_share(*batch))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    mean_loss = loss.detach()
    gd.all_reduce(mean_loss, dist.ReduceOp.AVG)
    return mean_loss.item()


def train(args: argparse.Namespace, store: dist.Store) -> tuple[DDP, torch.optim.Optimizer, Log]:
    training, held_out = load_bytes()
    torch.manual_seed(args.seed)
    model = DDP(GPT(), bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    log = Log()
    model.register_comm_hook(log, average_gradients)
    validate_every = max(1, args.steps // 12)
    victims = plan_kills(args, dist.get_world_size())
    log.kills = sorted(victims)
    name = dist.get_rank()  # stays, when ranks change

    bar = None
    for step in range(args.steps):
        if victims.get(step) == name:
            kill_in_backward(model, store, step)
        optimizer.param_groups[0]["lr"] = learning_rate(step, args.steps)
        batch = sample(training, args.seed * 1_000_000 + step, BATCH)
        log.losses[step] = train_step(model, optimizer, batch)
        if dist.get_rank() == 0:  # of those who are left
            if (step + 1) % validate_every == 0 or step + 1 == args.steps:
                log.validation[step + 1] = validate(model.module, held_out)
            if bar is None:
                bar = tqdm(total=args.steps, initial=step, unit="step")
            bar.set_postfix(
                ranks=dist.get_world_size(), loss=f"{log.losses[step]:.3f}", refresh=False
            )
            bar.update(step + 1 - bar.n)
    if bar is not None:
        bar.close()
    return model, optimizer, log


def plan_kills(args: argparse.Namespace, ranks: int) -> dict[int, int]:
    """The victim of each step that has one; the same on all ranks."""
    victims = random.Random(args.seed).sample(range(ranks), args.kills)
    return {args.steps * (i + 1) // (args.kills + 1): rank for i, rank in enumerate(victims)}


def kill_in_backward(model: DDP, store: dist.Store, step: int) -> None:
    """This process ends in its next backward pass, when the last layers are averaged already."""

    def kill(_: Tensor) -> None:
        store.set(f"killed in step {step}", str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    model.module.blocks[DEPTH // 2].qkv.weight.register_hook(kill)


def gather(tensor: Tensor) -> Tensor:
    """Everybody's tensor, [world_size, *shape]."""
    out = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(out, tensor)
    return torch.stack(out)


def check_identical(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Compares the ranks' parameters and optimizer states bit by bit; their common SHA-256."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        state = [value for _, value in sorted(optimizer.state[parameter].items())]
        for tensor in [parameter.data, *state]:
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    fingerprints = gather(torch.tensor(list(digest.digest()), dtype=torch.uint8))
    if not (fingerprints == fingerprints[0]).all():
        raise RuntimeError("ranks hold different parameters or optimizer states")
    return digest.hexdigest()


def report(args: argparse.Namespace, store: dist.Store, log: Log, state: str) -> None:
    """Tell what happened. Collective."""
    table = gather(torch.tensor([log.went_on[left] for left in sorted(log.went_on)][::-1]).double())
    if dist.get_rank() != 0:
        return
    first, last = log.losses[0], log.validation[args.steps]
    print(f"loss {first:.2f} -> {last:.3f} nats/byte, the latter on held-out files")
    killed = [float(store.get(f"killed in step {step}")) for step in log.kills]
    worst = [max(column) for column in table.T.tolist()]
    for step, before, after in zip(log.kills, killed, worst, strict=True):
        ms = 1e3 * (after - before)
        print(f"a rank killed in step {step}: the others had their next average {ms:.0f} ms later")
    print(f"{len(table)} ranks hold bit-identical parameters and optimizer states: {state[:16]}")
    curves = {"losses": log.losses, "validation": log.validation, "kills": log.kills}
    args.out.with_suffix(".json").write_text(json.dumps(curves))
    plot(args, log, len(table))
    print(f"loss curve: {args.out}")


def plot(args: argparse.Namespace, log: Log, ranks: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    losses = [log.losses[step] for step in sorted(log.losses)]
    # Averaged over a window that grows with the step, so that the steep start stays steep.
    smooth = [statistics.fmean(losses[i - i // 8 : i + i // 8 + 1]) for i in range(len(losses))]

    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color="#9ecae1", linewidth=0.8, label="training, each step")
    axes.plot(steps, smooth, color="#08519c", linewidth=2, label="training, smoothed")
    val_steps, val_losses = zip(*log.validation.items(), strict=True)
    axes.plot(val_steps, val_losses, "o", color="#e6550d", label="held-out files", clip_on=False)
    if args.beside is not None:
        other = json.loads(args.beside.read_text())["validation"]
        axes.plot(
            [int(step) for step in other],
            list(other.values()),
            "x",
            color="#31a354",
            label=f"held-out files, {args.beside.stem}",
        )
    for i, step in enumerate(log.kills):
        axes.axvline(step, color="#a50f15", linestyle="--", linewidth=1.2)
        axes.annotate(
            f"{ranks + len(log.kills) - i - 1} ranks left",
            (step, 0.86),
            (8, 0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            color="#a50f15",
        )
    axes.set(xlabel="step", ylabel="loss (nats per byte)", xlim=(0, len(losses)))
    axes.set_title("A byte-level GPT that outlives some of its ranks")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(args.out, dpi=150)


def parse_args(ranks: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--kills", type=int, default=1, help="how many ranks are killed")
    parser.add_argument("--seed", type=int, default=0, help="of model, data and victims")
    parser.add_argument(
        "--out", type=Path, default=Path("train_through_failure.png"), help="and .json beside it"
    )
    parser.add_argument("--beside", type=Path, help="the .json of another run, to compare with")
    args = parser.parse_args()
    if not 0 <= args.kills < ranks:
        parser.error(f"--kills must be 0 or more and below the number of ranks, {ranks}")
    if args.steps < 2 * (args.kills + 1):
        parser.error("--steps must be twice --kills and 2 or more")
    return args


def main() -> None:
    torch.set_num_threads(1)  # ranks share the cores
    store, rank, world_size = next(dist.rendezvous("env://"))
    args = parse_args(world_size)
    dist.init_process_group("gpumode", store=store, rank=rank, world_size=world_size)
    try:
        model, optimizer, log = train(args, store)
    except gd.WorldTooSmall as error:  # it was frozen, and the others went on
        print(error)
        return  # another exit code than 0 would end them
    state = check_identical(model, optimizer)
    report(args, store, log, state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
