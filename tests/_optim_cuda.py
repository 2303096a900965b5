"""Parameters on a GPU, with gradients."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from _optim import BF16, F16, F32, F64, FUSED, bits, laid_out, parameter, randn
from torch import Tensor
from torch.nn import Parameter

SUMS = ("LAMB", "NovoGrad")  # which add up over tensors, in an order of their own


def on_cuda(values: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Returns copies that lie alike in the copy of the memory, aligned as they are there."""
    first = memory.storage_offset()
    whole = memory.new_empty(0).set_(memory.untyped_storage()).cuda()
    copy = whole.as_strided(memory.shape, memory.stride(), first)
    return whole.as_strided(values.shape, values.stride(), values.storage_offset()), copy


def assert_same(cuda: Tensor, cpu: Tensor, name: str, what: str) -> None:
    """Checks that bits are the same; of rules that sum, nearly all, and the rest are close."""
    cuda = cuda.detach().cpu()
    if name not in SUMS:
        assert bits(cuda)[0:2] == bits(cpu)[0:2], what
        wrong = cuda.contiguous().reshape(-1) != cpu.detach().contiguous().reshape(-1)
        assert not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()} elements"
        return
    rtol = {F64: 1e-12, F32: 1e-5, F16: 3e-3, BF16: 2e-2}.get(cpu.dtype, 0.0)
    if cpu.dtype in (torch.int16, torch.uint8):  # the low halves of floats; what chance rounds
        assert (cuda != cpu).sum() <= max(4, cpu.numel() // 50), what
        return
    torch.testing.assert_close(cuda, cpu.detach(), rtol=rtol, atol=1e-6, msg=lambda m: what + m)


class Pair:
    """The same parameters on CPU and CUDA, each with its optimizer."""

    def __init__(self, name: str, param: torch.dtype, tensors: list[Any], **options: Any) -> None:
        self.name = name
        seed = zlib.crc32(repr((name, param, len(tensors), options)).encode())
        self.generator = torch.Generator().manual_seed(seed)
        self.layouts = [tensor[2] for tensor in tensors]
        self.cpu: list[Parameter] = []
        self.cuda: list[Parameter] = []
        self.memory = []
        for layout, shape, _ in tensors:
            values, memory = laid_out(layout, shape, param, self.generator)
            there, memory_there = on_cuda(values, memory)
            self.cpu.append(parameter(values))
            self.cuda.append(parameter(there))
            self.memory.append((memory, memory_there))
        half = len(tensors) // 2
        self.optimizers = tuple(
            FUSED[name](
                [{"params": p[:half]}, {"params": p[half:], "lr": 0.07}], lr=0.03, **options
            )
            for p in (self.cpu, self.cuda)
        )

    def make_grads(self, dtype: torch.dtype, number: int) -> None:
        for i, (layout, cpu, cuda) in enumerate(
            zip(self.layouts, self.cpu, self.cuda, strict=True)
        ):
            cpu.grad = cuda.grad = None
            if (i + 3 * number) % 5 == 4:
                continue
            values, memory = laid_out(layout, cpu.shape, dtype, self.generator)
            cpu.grad, cuda.grad = values, on_cuda(values, memory)[0]

    def step(self, **arguments: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.step(**arguments)

    def check(self) -> None:
        for i, (cpu, cuda) in enumerate(zip(self.cpu, self.cuda, strict=True)):
            what = f"parameter {i}, {tuple(cpu.shape)}, strides {cpu.stride()}"
            assert_same(cuda, cpu, self.name, what)
            assert_same(self.memory[i][1], self.memory[i][0], self.name, what + ", around it")
            ours = self.optimizers[0].state.get(cpu, {})
            theirs = self.optimizers[1].state.get(cuda, {})
            assert ours.keys() == theirs.keys()
            for key, value in ours.items():
                assert theirs[key].device.type == "cuda"
                assert_same(theirs[key], value, self.name, f"{what}: {key}")


def make(dtype: torch.dtype = F32, seed: int = 0) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    made = [parameter(randn(size, dtype, generator).cuda()) for size in ((5, 7), (40_000,), ())]
    for param in made:
        param.grad = randn(param.shape, dtype, generator).cuda()
    return made
