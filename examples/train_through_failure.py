"""Train a small GPT on 4 ranks, kill one in the middle of a backward pass, and train on.

    torchrun --nproc-per-node=4 -m torch_gpumode.run examples/train_through_failure.py

The data are the bytes of Python's own standard library. At a third of the run one rank kills
itself with SIGKILL while gradients are being averaged. On the others `backward()` raises, they
rebuild the group without the dead rank, make sure that they hold the same state, and redo the
step. What that takes is in `agree_on_state` and the loop of `train`; the rest is ordinary DDP.
"""

import argparse
import hashlib
import math
import os
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
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm

import torch_gpumode.distributed

CONTEXT = 128  # bytes that the model sees
BATCH = 4  # windows per rank and step
WIDTH, DEPTH, HEADS = 192, 3, 6
PEAK_LR, WARMUP_STEPS = 2e-3, 30
KILLED_RANK = 1


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
    """What happened: losses in nats per byte, moments in seconds of the host's monotonic clock."""

    losses: dict[int, float] = field(default_factory=dict)  # by step, mean over ranks
    validation: dict[int, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    moments: dict[str, float] = field(default_factory=dict)


def gather(tensor: Tensor) -> Tensor:
    """Everybody's tensor, [world_size, *shape]."""
    out = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(out, tensor)
    return torch.stack(out)


def train_step(
    model: DDP, optimizer: torch.optim.Optimizer, data: Tensor, step: int, steps: int
) -> float:
    """One step on all ranks; their mean loss. Nothing has changed if it raises."""
    optimizer.param_groups[0]["lr"] = learning_rate(step, steps)
    optimizer.zero_grad()
    loss = loss_of(model, *sample(data, seed=step * 1000 + dist.get_rank(), batch=BATCH))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    mean_loss = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean_loss)
    optimizer.step()
    return mean_loss.item()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All tensors that ranks must agree on, in an order that is the same on all of them."""
    tensors = [p.data for p in model.parameters()]
    for p in model.parameters():
        tensors += [value for _, value in sorted(optimizer.state[p].items())]
    return tensors


def fingerprint(tensors: list[Tensor]) -> Tensor:
    """SHA-256 of the tensors' bits, [32]."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)


def agree_on_state(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> int:
    """Bring all ranks to the same state after a failure; the number of steps that it has done.

    A rank may have finished a step whose last collective failed on another. That one takes the
    whole state from the one that is ahead; by more than one step nobody can be.
    """
    steps = gather(torch.tensor(step)).tolist()
    if min(steps) < max(steps):
        state = state_of(model, optimizer)
        received = [tensor.clone() for tensor in state]  # whole or not at all
        for tensor in received:
            dist.broadcast(tensor, src=steps.index(max(steps)))
        for tensor, new in zip(state, received, strict=True):
            tensor.copy_(new)
    check_identical(model, optimizer)
    return max(steps)


def check_identical(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Compares the ranks' states bit by bit; their common fingerprint."""
    fingerprints = gather(fingerprint(state_of(model, optimizer)))
    if not (fingerprints == fingerprints[0]).all():
        raise RuntimeError("ranks hold different parameters or optimizer states")
    return bytes(fingerprints[0].tolist()).hex()


def train(args: argparse.Namespace, store: dist.Store) -> tuple[DDP, torch.optim.Optimizer, Log]:
    training, held_out = load_bytes()
    torch.manual_seed(0)
    model = DDP(GPT(), bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    log = Log()
    validate_every = max(1, args.steps // 12)
    killed_rank_is_me = dist.get_rank() == KILLED_RANK

    step, recovering = 0, False
    bar = tqdm(total=args.steps, unit="step", disable=dist.get_rank() != 0)
    while step < args.steps:
        if step == args.kill_at and killed_rank_is_me:
            kill_in_backward(model, store)
        try:
            if recovering:
                torch_gpumode.distributed.rebuild()
                log.moments.setdefault("group rebuilt", time.monotonic())
                step = agree_on_state(model, optimizer, step)
            loss = train_step(model, optimizer, training, step, args.steps)
        except torch_gpumode.distributed.WorldTooSmall:
            raise  # the others went on without this rank, or too few are left
        except dist.DistBackendError as error:
            log.moments.setdefault("exception", time.monotonic())
            log.errors.append(type(error).__name__)
            recovering = True
            continue
        if recovering:
            log.moments.setdefault("next good step", time.monotonic())
            recovering = False
        log.losses[step] = loss
        step += 1
        if dist.get_rank() == 0:  # of those who are left
            if step % validate_every == 0 or step == args.steps:
                log.validation[step] = validate(model.module, held_out)
            bar.disable = False
            bar.set_postfix(ranks=dist.get_world_size(), loss=f"{loss:.3f}", refresh=False)
            bar.update(step - bar.n)
    bar.close()
    return model, optimizer, log


def kill_in_backward(model: DDP, store: dist.Store) -> None:
    """This process ends in its next backward pass, with gradients of the last layers in flight."""

    def kill(_: Tensor) -> None:
        store.set("killed at", str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    model.module.blocks[DEPTH // 2].qkv.weight.register_hook(kill)


def report(args: argparse.Namespace, store: dist.Store, log: Log, state: str, rank: int) -> None:
    """Tell what happened; `rank` is the one from before the kill. Collective."""
    killed_at = float(store.get("killed at")) if args.kill else 0.0
    events = list(log.moments)
    after_ms = torch.tensor([rank, *(1e3 * (t - killed_at) for t in log.moments.values())])
    table = gather(after_ms)
    if dist.get_rank() != 0:
        return
    first, last = log.losses[0], log.validation[args.steps]
    print(f"loss {first:.2f} -> {last:.2f} nats/byte, the latter on held-out files")
    if args.kill:
        print(f"rank {KILLED_RANK} killed in step {args.kill_at}; ms after the kill:")
        print("  rank" + "".join(f"{event:>17}" for event in events))
        for row in table.tolist():
            print(f"  {row[0]:4.0f}" + "".join(f"{ms:17.1f}" for ms in row[1:]))
        print(f"backward() raised {log.errors[0]}")
    print(f"{len(table)} ranks hold bit-identical parameters and optimizer states: {state[:16]}")
    plot(args, log, len(table), table[:, -1].max().item())
    print(f"loss curve: {args.out}")


def plot(args: argparse.Namespace, log: Log, ranks: int, resumed_ms: float) -> None:
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
    if args.kill:
        axes.axvline(args.kill_at, color="#a50f15", linestyle="--", linewidth=1.2)
        axes.annotate(
            f"rank {KILLED_RANK} of {ranks + 1} killed,\nnext step done {resumed_ms:.0f} ms later",
            (args.kill_at, 0.86),
            (8, 0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            color="#a50f15",
        )
    axes.set(xlabel="step", ylabel="loss (nats per byte)", xlim=(0, len(losses)))
    axes.set_title("A byte-level GPT that outlives one of its ranks")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(args.out, dpi=150)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--kill-at", type=int, help="step of the kill (default: a third of them)")
    parser.add_argument("--no-kill", dest="kill", action="store_false")
    parser.add_argument("--out", type=Path, default=Path("train_through_failure.png"))
    args = parser.parse_args()
    args.kill_at = args.steps // 3 if args.kill_at is None else args.kill_at
    if args.kill and not 2 <= args.kill_at < args.steps:
        parser.error("--kill-at must be 2 or more and below --steps")
    if not args.kill:
        args.kill_at = -1
    return args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)  # ranks share the cores
    store, rank, world_size = next(dist.rendezvous("env://"))
    dist.init_process_group("gpumode", store=store, rank=rank, world_size=world_size)
    model, optimizer, log = train(args, store)
    state = check_identical(model, optimizer)
    report(args, store, log, state, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
