"""Steps under torch.compile: the bits of eager ones, in one graph, which is made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _compiled import Pair
from _optim import BF16, F16, F32, F64, bits, parameter
from test_optim_user_changes import same_random
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.optim.lr_scheduler import OneCycleLR
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_gpumode import optim
from torch_gpumode.optim import FusedOptimizer, _traced


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield


# ------------------------------------------------------------------------------------------- bits

RICH: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {"amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    ("AdamW", {"weight_decay": 0.3}),
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    ("Adagrad", {"lr_decay": 0.2, "initial_accumulator_value": 0.5}),
    ("RMSprop", {"centered": True, "momentum": 0.5}),
    ("Lion", {"weight_decay": 0.2}),
    ("LAMB", {"use_nvlamb": True}),
    ("NovoGrad", {"reg_inside_moment": True, "weight_decay": 0.1}),
]
PRECISIONS: list[tuple[tuple[torch.dtype, ...], dict[str, Any]]] = [
    ((F32, F64, BF16, F16), {}),
    ((BF16, F16, F32), {"master": "fp32"}),
    ((BF16, F32), {"master": "remainder16", "state_dtype": BF16}),
    ((BF16, F32), {"stochastic_rounding": True, "state_dtype": BF16, "seed": 2**64 - 3}),
]
RICH_IDS = [f"{name}-{i}" for i, (name, _) in enumerate(RICH)]


@pytest.mark.parametrize("other", [0, 2])
@pytest.mark.parametrize("rule", range(len(RICH)), ids=RICH_IDS)
def test_bits(rule: int, other: int):
    name, options = RICH[rule]
    dtypes, more = PRECISIONS[(rule + other) % len(PRECISIONS)]
    pair = Pair(name, dtypes, **options, **more)
    for _ in range(3):
        pair.step()
    assert pair.num_graphs == 1


@pytest.mark.parametrize(
    ("name", "precision", "backend"),
    [
        ("AdamW", 3, "aot_eager"),
        ("NovoGrad", 1, "aot_eager"),
        ("LAMB", 2, "aot_eager"),
        ("AdamW", 1, "inductor"),
        ("NovoGrad", 3, "inductor"),
    ],
)
def test_bits_of_other_backends(name: str, precision: int, backend: str):
    dtypes, more = PRECISIONS[precision]
    pair = Pair(name, dtypes, backend, {"max_norm": 0.5}, **more)
    for _ in range(3):
        pair.step()
        assert bits(pair.eager.grad_norm) == bits(pair.compiled.grad_norm)
    assert pair.num_graphs == 1


@pytest.mark.parametrize("name", ["LAMB", "NovoGrad", "AdamW"])
def test_gradients_come_and_go(name: str):
    """Those that are not there take no part, in the norm neither; states come when they come."""
    pair = Pair(name, (F32, F64, BF16), step_options={"max_norm": 0.5}, stochastic_rounding=True)
    frozen = [params[1].requires_grad_(False) for params in pair.params]
    sets = [(2,), (), (2,), (), (0, 5)]
    for absent in sets:
        pair.make_grads()
        for params in pair.params:
            for i in absent:
                params[i].grad = None
        pair.eager.step(max_norm=0.5)
        pair.run()
        pair.check()
        assert bits(pair.eager.grad_norm) == bits(pair.compiled.grad_norm)
    assert pair.num_graphs == len(set(sets))
    assert bits(frozen[1]) == bits(frozen[0])
    assert not pair.compiled.state[frozen[1]]


def test_more_parameters_than_one_op_takes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_traced, "MAX_PARAMS", 4)
    pair = Pair("NovoGrad", (BF16, F32), "aot_eager", {"max_norm": 0.5}, stochastic_rounding=True)
    for _ in range(3):
        pair.step()
    assert pair.num_graphs == 1


def test_nothing_to_do():
    pair = Pair("AdamW", step_options={"max_norm": 1.0})
    pair.run()
    assert pair.compiled.grad_norm == 0
    pair.check()
    pair.step()


@pytest.mark.parametrize(("name", "options"), RICH, ids=RICH_IDS)
def test_eager_steps_in_between(name: str, options: dict[str, Any]):
    """Rules that save no step still know which is the first."""
    pair = Pair(name, **options)
    pair.make_grads()
    pair.change(lambda optimizer: optimizer.step())
    pair.step()
    pair.make_grads()
    pair.change(lambda optimizer: optimizer.step())
    pair.step()
    assert pair.num_graphs == 1


def test_eager_step_after_a_compilation_that_failed():
    """The state is there then, but the step that comes is still the first."""
    pair = Pair("SGD", lr=0.1, momentum=0.9, dampening=0.5)
    pair.make_grads()

    def fail(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("on purpose")

    with pytest.raises(Exception, match="on purpose"):
        torch.compile(pair.compiled.step, backend=fail)()
    torch._dynamo.reset()
    loaded = same_random(pair.params[0][5].detach())  # a buffer that there is makes it the second
    for optimizer, params in zip(pair.optimizers, pair.params, strict=True):
        optimizer.state[params[5]]["momentum_buffer"] = loaded.clone()
    pair.change(lambda optimizer: optimizer.step())
    pair.check()
    pair.step()


def test_closure():
    pair = Pair("AdamW")
    pair.make_grads()
    kept = [[param.grad for param in params] for params in pair.params]

    def closure_of(which: int) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            assert torch.is_grad_enabled()
            for param, grad in zip(pair.params[which], kept[which], strict=True):
                param.grad = 2 * grad
            return torch.stack([grad.sum() for grad in kept[which]]).sum()

        return closure

    run = torch.compile(pair.compiled.step, backend="eager", fullgraph=True)
    assert bits(pair.eager.step(closure_of(0))) == bits(run(closure_of(1)))
    pair.check()


# -------------------------------------------------------------------------------- whole train steps


def model_and_optimizer(**options: Any) -> tuple[nn.Module, FusedOptimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2))
    return model, optim.FusedAdamW(model.parameters(), lr=0.1, **options)


def train_step(
    model: nn.Module, optimizer: FusedOptimizer, x: Tensor, clip: str, set_to_none: bool
) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    if clip == "outside":
        optim.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step(max_norm=0.05 if clip == "inside" else None)
    optimizer.zero_grad(set_to_none)
    return loss.detach()


@pytest.mark.parametrize(
    ("clip", "set_to_none", "backend"),
    [
        ("inside", True, "aot_eager"),
        ("outside", True, "aot_eager"),
        ("no", False, "aot_eager"),
        ("inside", True, "inductor"),
    ],
)
def test_train_step(backend: str, clip: str, set_to_none: bool):
    """Forward, backward, clipping, step and zero_grad in one graph."""
    counter = CompileCounterWithBackend(backend)
    (model, optimizer), (other, compiled) = model_and_optimizer(), model_and_optimizer()
    run = torch.compile(train_step, backend=counter, fullgraph=True)
    schedulers = [OneCycleLR(each, 0.2, total_steps=20) for each in (optimizer, compiled)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        x = torch.randn(9, 6, generator=generator)
        loss = train_step(model, optimizer, x, clip, set_to_none)
        torch.testing.assert_close(run(other, compiled, x, clip, set_to_none), loss)
        for scheduler in schedulers:
            scheduler.step()
        if backend == "aot_eager" and clip != "outside":  # else gradients are others already
            assert bits(list(model.parameters())) == bits(list(other.parameters()))
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
            assert (ours.grad is None) == (theirs.grad is None) == set_to_none
    assert counter.frame_count == 1 if set_to_none else 2  # the first has no gradients yet


def test_grad_scaler():
    """It calls the compiled step, which divides by the scale, and skips what is not finite."""
    counter = CompileCounterWithBackend("aot_eager")
    pairs = [model_and_optimizer(), model_and_optimizer()]
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in pairs]
    pairs[1][1].step = torch.compile(pairs[1][1].step, backend=counter, fullgraph=True)
    generator = torch.Generator().manual_seed(1)
    for i in range(6):
        x = torch.randn(9, 6, generator=generator) * (float("inf") if i == 3 else 1)
        for (model, optimizer), scaler in zip(pairs, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        states = [bits(optimizer.state_dict()["state"]) for _, optimizer in pairs]
        assert states[0] == states[1]
    assert scalers[0].get_scale() == scalers[1].get_scale() != 64.0
    assert pairs[1][1].state_dict()["state"][0]["step"] == 5
    assert counter.frame_count == 1


# ------------------------------------------------------------------------------ what is not traced


def test_muon_breaks_the_graph():
    torch.manual_seed(4)
    matrices = [torch.randn(5, 4), torch.randn(3, 3)]
    params = [[parameter(value.clone()) for value in matrices] for _ in range(2)]
    eager, compiled = (optim.FusedMuon(each, lr=0.1) for each in params)

    def step(x: Tensor) -> Tensor:
        compiled.step()
        return x + 1

    run = torch.compile(step, backend="eager")
    for _ in range(3):
        for ours, theirs in zip(*params, strict=True):
            ours.grad = torch.randn(ours.shape)
            theirs.grad = ours.grad.clone()
        eager.step()
        assert run(torch.tensor(1.0)) == 2
        assert bits(params[0]) == bits(params[1])
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="of FusedMuon"):
        torch.compile(step, backend="eager", fullgraph=True)(torch.tensor(1.0))


def test_dtensors_break_the_graph():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        values = torch.randn(6)
        params = [nn.Parameter(distribute_tensor(values.clone(), mesh)) for _ in range(2)]
        eager, compiled = (optim.FusedAdamW([param], lr=0.1) for param in params)
        run = torch.compile(compiled.step, backend="eager")
        for _ in range(2):
            grad = torch.randn(6)
            for param in params:
                param.grad = distribute_tensor(grad.clone(), mesh)
            eager.step()
            run()
            assert bits([p.to_local() for p in params[:1]]) == bits([params[1].to_local()])
        assert not torch.equal(params[0].to_local(), values)
    finally:
        dist.destroy_process_group()


def test_a_scaler_breaks_the_graph():
    pair = Pair("AdamW")
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    compiled = pair.compiled

    def step(scaler: Any) -> None:
        compiled.step(max_norm=0.5, scaler=scaler)

    pair.make_grads()
    for scaler in scalers:
        scaler.scale(torch.tensor(1.0))
    pair.eager.step(max_norm=0.5, scaler=scalers[0])
    torch.compile(step, backend="eager")(scalers[1])
    pair.check()
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="step with a scaler"):
        torch.compile(step, backend="eager", fullgraph=True)(scalers[1])


@pytest.mark.parametrize("fullgraph", [True, False])
def test_zero_grad_before_backward(fullgraph: bool):
    """Is refused: it would look like training."""
    model = nn.Linear(4, 3)
    optimizer = optim.FusedAdamW(model.parameters(), lr=0.1)

    def train(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    before = bits(list(model.parameters()))
    with pytest.raises(Exception, match="calls zero_grad before backward and step"):
        torch.compile(train, backend="aot_eager", fullgraph=fullgraph)(torch.randn(5, 4))
    assert bits(list(model.parameters())) == before
