"""What a language model learns with states of float32, bfloat16 and 8 bits.

Prints the mean loss of the last steps, for each seed; the text is Python's own library. On one CPU
thread it takes about three minutes.

    python benchmarks/optim_states.py --seeds 3
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_gpumode import optim

WIDTH, LENGTH, BATCH, STEPS, LAST = 96, 64, 12, 600, 100
KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"state_dtype": torch.bfloat16, "stochastic_rounding": True},
    "8 bits": {"state_dtype": torch.uint8},
}


class Model(nn.Module):
    def __init__(self, num_characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(num_characters, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, num_characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.characters(x) + self.places.weight
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return self.head(x)


def text() -> Tensor:
    """Returns the characters of some modules, numbered."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    characters = "".join(path.read_text(errors="ignore") for path in files)
    numbers = {character: i for i, character in enumerate(sorted(set(characters)))}
    return torch.tensor([numbers[character] for character in characters])


def train(data: Tensor, kind: str, beta2: float, seed: int) -> float:
    torch.manual_seed(seed)
    model = Model(int(data.max()) + 1)
    optimizer = optim.FusedAdamW(
        model.parameters(), lr=2e-3, betas=(0.9, beta2), seed=seed, **KINDS[kind]
    )
    losses = []
    for _ in range(STEPS):
        begin = torch.randint(0, len(data) - LENGTH - 1, (BATCH, 1))
        batch = data[begin + torch.arange(LENGTH + 1)]
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return statistics.mean(losses[-LAST:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = text()
    for beta2 in (0.999, 0.95):
        for kind in KINDS:
            losses = [train(data, kind, beta2, seed) for seed in range(args.seeds)]
            found = ", ".join(f"{loss:.4f}" for loss in losses)
            print(f"beta2 {beta2}, {kind}: {found}", flush=True)


if __name__ == "__main__":
    main()
