"""Fused optimizers on CUDA: the same bits as on the CPU, which has been compared with the
specification."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from _optim import BF16, F16, F32, F64, FUSED, parameter, randn
from _optim_cases import ROWS, RULES, TENSORS, name_of
from _optim_cuda import SUMS, Pair, make

from torch_gpumode import optim

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

INF = float("inf")
U8 = torch.uint8


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_seven_steps(row: dict[str, Any]):
    name, options = RULES[row["rule"]]
    options = {**options, "state_dtype": row["state"], "master": row["master"]}
    pair = Pair(name, row["param"], TENSORS, **options)
    for number in range(7):
        pair.make_grads(row["grad"], number)
        pair.step()
        pair.check()


LARGE = [
    ("contiguous", (70001,), "contiguous"),
    ("contiguous", (65536,), "misaligned"),
    ("slice", (131, 301), "expanded"),
    ("transposed", (257, 101), "contiguous"),
    ("contiguous", (3, 50_000), "contiguous"),
    ("contiguous", (0,), "contiguous"),
    ("contiguous", (211, 103), "transposed"),
    ("misaligned", (41_003,), "contiguous"),
]


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (F32, {}),
        (BF16, {"master": "remainder16"}),
        (BF16, {"stochastic_rounding": True, "state_dtype": BF16, "seed": 2**40 + 3}),
        (F16, {"master": "fp32"}),
        (F64, {}),
        (F32, {"state_dtype": U8}),
        (BF16, {"state_dtype": U8, "seed": 2**63 + 5}),
        (BF16, {"state_dtype": U8, "master": "remainder16"}),
        (BF16, {"state_dtype": U8, "master": "fp32"}),
        (F16, {"state_dtype": U8}),
    ],
    ids=[
        *("float32", "remainder16", "stochastic", "float16", "float64"),
        *("8-bits", "8-bits-bfloat16", "8-bits-remainder16", "8-bits-master", "8-bits-float16"),
    ],
)
@pytest.mark.parametrize("name", FUSED)
def test_large(name: str, dtype: torch.dtype, options: dict[str, Any]):
    """Tensors that many blocks update."""
    pair = Pair(name, dtype, LARGE, weight_decay=0.1, **options)
    for number in range(3):
        pair.make_grads(F32, number)
        pair.step()
    is_by_chance = "stochastic_rounding" in options or options.get("state_dtype") == U8
    if name in SUMS and is_by_chance:
        return  # one bit decides how the next are rounded
    pair.check()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "SGD", "LAMB", "NovoGrad"])
def test_more_tiles_than_blocks(name: str, dtype: torch.dtype):
    """Blocks that take one tile after the other, of tensors of all lengths and two dtypes."""
    sizes = (3_000_001, 5, 500_000, 70_001, 9_000_003, 0, 65_536, 1)
    pair = Pair(name, dtype, [("contiguous", (size,), "contiguous") for size in sizes])
    for number in range(3):
        pair.make_grads(dtype if number < 2 else F32, number)
        pair.step(max_norm=1.0)
        norms = [optimizer.grad_norm for optimizer in pair.optimizers]
        torch.testing.assert_close(norms[1].cpu(), norms[0])
    for cpu, cuda in zip(pair.cpu, pair.cuda, strict=True):
        # Clipped by norms that were added up in another order.
        torch.testing.assert_close(cuda.cpu(), cpu, rtol=2e-2 if dtype == BF16 else 1e-5, atol=1e-6)
        steps = [o.state[p].get("step") for o, p in zip(pair.optimizers, (cpu, cuda), strict=True)]
        assert steps[0] is steps[1] is None or torch.equal(steps[0], steps[1].cpu())


def test_sums_do_not_depend_on_chance():
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = (2_000_003, 70_001, 5, 3_000_000, 1_000_000)
    params = [parameter(torch.zeros(size, device="cuda")) for size in sizes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, device="cuda")
    norms = {float(optim.clip_grad_norm_(params, float("inf"))) for _ in range(20)}
    assert len(norms) == 1
    expected = math.sqrt(sum(float(p.grad.double().square().sum()) for p in params))
    assert norms.pop() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", FUSED)
def test_every_small_size(name: str):
    tensors = [("contiguous", (numel,), "contiguous") for numel in range(1, 131)]
    pair = Pair(name, F32, tensors)
    for number in range(2):
        pair.make_grads(F32, number)
        pair.step()
        pair.check()


@pytest.mark.parametrize("num_tensors", [1, 3000])
def test_many_tensors_and_both_precisions(num_tensors: int):
    """Of float64 and float32 in one optimizer: two kernels."""
    generator = torch.Generator().manual_seed(num_tensors)
    cpu = [
        parameter(randn((17 + i % 40,), (F32, F64)[i % 2], generator)) for i in range(num_tensors)
    ]
    cuda = [parameter(p.detach().cuda()) for p in cpu]
    ours, theirs = (optim.FusedAdamW(p, lr=0.1) for p in (cuda, cpu))
    for _ in range(2):
        for a, b in zip(cpu, cuda, strict=True):
            a.grad = randn(a.shape, a.dtype, generator)
            b.grad = a.grad.cuda()
        ours.step(max_norm=1.0)
        theirs.step(max_norm=1.0)
    torch.testing.assert_close(ours.grad_norm.cpu(), theirs.grad_norm)
    for a, b in zip(cpu, cuda, strict=True):
        torch.testing.assert_close(b.cpu(), a)


@pytest.mark.long
def test_more_elements_than_an_int():
    """Case O4."""
    numel, period = 2_359_332_864, 2**12
    values = torch.randn(period, device="cuda").to(BF16)
    param = parameter(values.repeat(numel // period))
    param.grad = torch.randn(period, device="cuda").to(BF16).repeat(numel // period)
    optimizer = optim.FusedSGD([param], lr=0.1)
    before = param[:period].detach().clone()
    optimizer.step()
    small = parameter(before)
    small.grad = param.grad[:period].clone()
    optim.FusedSGD([small], lr=0.1).step()
    assert all(torch.equal(chunk, small) for chunk in param.detach().split(period)[-2:])
    assert torch.equal(param.detach().view(-1, period).amax(0), small)
    assert torch.equal(param.detach().view(-1, period).amin(0), small)


# ---------------------------------------------------------------------------------- clip and scale


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("max_norm", [0.5, 1e9, 0.0])
def test_clip_grad_norm(dtype: torch.dtype, max_norm: float):
    ours, theirs = make(dtype), make(dtype)
    norm = optim.clip_grad_norm_(ours, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert norm.device.type == "cuda"
    tolerance = {"rtol": 1e-2, "atol": 1e-3} if dtype == BF16 else {"rtol": 1e-5, "atol": 1e-8}
    torch.testing.assert_close(norm.to(expected.dtype), expected, **tolerance)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, **tolerance)


def train(device: str, how: str, max_norm: float | None) -> list[Any]:
    """Returns the parameters, states and scale after steps of which two overflow."""
    params = [parameter(p.detach().to(device)) for p in make()]
    optimizer = optim.FusedAdamW(params, lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=3)
    generator = torch.Generator().manual_seed(7)
    for number in range(6):
        for param in params:
            grad = randn(param.shape, F32, generator).to(device) * scaler.scale(
                torch.ones((), device=device)
            )
            param.grad = grad.detach()
        if number in (1, 4):
            params[1].grad[39_999] = INF if number == 1 else math.nan
        if how == "scaler=":
            optimizer.step(scaler=scaler, max_norm=max_norm)
        elif how == "scaler.step":
            scaler.step(optimizer)
        else:
            scaler.unscale_(optimizer)
            optimizer.step(scaler=scaler, max_norm=max_norm)
        scaler.update()
    return [*params, *[v for p in params for v in optimizer.state[p].values()], scaler._scale]


@pytest.mark.parametrize(
    ("how", "max_norm"),
    [
        ("scaler=", None),
        ("scaler=", 3.0),
        ("scaler.step", None),  # which takes no max_norm
        ("unscale_", None),
        ("unscale_", 3.0),
    ],
)
def test_scaler(how: str, max_norm: float | None):
    cuda, cpu = train("cuda", how, max_norm), train("cpu", how, max_norm)
    for a, b in zip(cuda, cpu, strict=True):
        torch.testing.assert_close(a.cpu(), b)
    assert cuda[3].item() == 4, "steps that overflow do not count"


def test_nothing_waits_for_the_device():
    """Neither to step, nor to clip, nor with a scaler."""
    params = make()
    optimizer = optim.FusedAdamW(params, lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(torch.ones((), device="cuda"))
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
        optimizer.step(max_norm=1.0)
        optimizer.step(scaler=scaler, max_norm=1.0)
        optim.clip_grad_norm_(params, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_found_inf_changes_nothing():
    for options in ({}, {"master": "remainder16"}, {"stochastic_rounding": True}):
        for name in FUSED:
            params = make(BF16)
            optimizer = FUSED[name](params, lr=0.1, **options)
            optimizer.step()
            kept = [v for p in params for v in optimizer.state[p].values()]
            before = [each.detach().clone() for each in (*params, *kept)]
            optimizer.found_inf = torch.ones((), device="cuda")
            optimizer.step()
            assert all(map(torch.equal, before, (*params, *kept))), name
            optimizer.found_inf = torch.zeros((), device="cuda")
            optimizer.step()
            assert not any(map(torch.equal, before[:2], params[:2])), name


# ------------------------------------------------------------------------------- moving and loading


def test_resume_from_a_checkpoint_on_the_cpu():
    params, others = make(), make()
    optimizer = optim.FusedAdamW(params, lr=0.1)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"] = {
        i: {k: v.cpu() for k, v in kept.items()} for i, kept in saved["state"].items()
    }
    with torch.no_grad():
        for a, b in zip(others, params, strict=True):
            a.copy_(b)
    resumed = optim.FusedAdamW(others, lr=0.3)
    resumed.load_state_dict(saved)
    for each in (optimizer, resumed):
        each.step()
    assert all(map(torch.equal, params, others))


def test_memory_that_moved():
    """Parameters and states whose memory others have replaced."""
    params, others = make(), make()
    a, b = (optim.FusedAdamW(p, lr=0.1) for p in (params, others))
    for each in (a, b):
        each.step()
    params[1].data = params[1].data.clone()
    state = a.state[params[0]]
    state["exp_avg"].data = state["exp_avg"].data.clone()
    state["step"] = torch.tensor([1.0])  # as some checkpoints have it
    for each in (a, b):
        each.step()
    assert all(map(torch.equal, params, others))


def test_other_views_of_the_same_memory():
    memory = torch.randn(2, 48, 48, device="cuda")
    values = memory.clone()
    ours, theirs = parameter(memory[0]), parameter(memory[0].clone())
    optimizers = [optim.FusedSGD([p], lr=0.1) for p in (ours, theirs)]
    for view in (lambda m: m[0], lambda m: m[1], lambda m: m[1].t(), lambda m: m[1].view(64, 36)):
        before = memory.clone()
        ours.grad = theirs.grad = None
        ours.data = view(memory)
        theirs.data = view(values).clone()
        ours.grad = torch.randn(ours.shape, device="cuda")
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        view(before).copy_(theirs.detach())
        assert torch.equal(memory, before)
        values = memory.clone()


def test_two_devices():
    cpu, cuda = [p.detach().cpu() for p in make()], make()
    mixed = [parameter(each) for each in cpu]
    for param, other in zip(mixed, cuda, strict=True):
        param.grad = other.grad.cpu()
    both, alone = make(), make()
    together = optim.FusedAdamW([*mixed, *both], lr=0.1)
    together.step(max_norm=1.0)
    reference = optim.FusedAdamW([*alone, *cuda], lr=0.1)
    reference.step(max_norm=1.0)
    torch.testing.assert_close(together.grad_norm.cpu(), reference.grad_norm.cpu())
    for a, b in zip([*both, *mixed], [*alone, *cuda], strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu())


def test_muon():
    generator = torch.Generator().manual_seed(0)
    cpu = [parameter(randn(shape, F32, generator)) for shape in ((16, 24), (24, 16), (16, 24))]
    cuda = [parameter(p.detach().cuda()) for p in cpu]
    optimizers = [optim.FusedMuon(p, lr=0.1) for p in (cpu, cuda)]
    for _ in range(3):
        for a, b in zip(cpu, cuda, strict=True):
            a.grad = randn(a.shape, F32, generator)
            b.grad = a.grad.cuda()
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(cpu, cuda, strict=True):
        momentum = [o.state[p]["momentum_buffer"] for o, p in zip(optimizers, (a, b), strict=True)]
        assert torch.equal(momentum[1].cpu(), momentum[0])
        torch.testing.assert_close(b.cpu(), a, rtol=0.05, atol=0.02)
