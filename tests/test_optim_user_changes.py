"""What users change behind an optimizer's back between steps, and compose it with: as with torch's.

Each change is made to a fused optimizer and to torch's own; then both go on and stay the same.
"""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _optim import BF16, F16, F32, F64, FUSED, Twins, bits, everything, parameter, randn
from torch import Tensor
from torch.nn import Parameter
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

RULES = [
    ("AdamW", {"amsgrad": True}, "exp_avg"),
    ("SGD", {"lr": 0.1, "momentum": 0.9}, "momentum_buffer"),
    ("RMSprop", {"momentum": 0.5, "centered": True}, "square_avg"),
]


def same_random(tensor: Tensor) -> Tensor:
    """Returns positive random values that are the same for both optimizers."""
    generator = torch.Generator().manual_seed(tensor.numel())
    return randn(tensor.shape, tensor.dtype, generator).abs()


def replace_values(optimizer: Any, params: list[Parameter], name: str) -> None:
    for param in params:
        optimizer.state[param][name] = same_random(param.detach())


def replace_one_value(optimizer: Any, params: list[Parameter], name: str) -> None:
    optimizer.state[params[1]][name] = same_random(params[1].detach())


def change_in_place(optimizer: Any, params: list[Parameter], name: str) -> None:
    for param in params:
        optimizer.state[param][name].mul_(0.5).add_(same_random(param.detach()))


def replace_layout(optimizer: Any, params: list[Parameter], name: str) -> None:
    values = optimizer.state[params[1]][name]
    optimizer.state[params[1]][name] = values.t().contiguous().t()


def replace_step(optimizer: Any, params: list[Parameter], name: str) -> None:
    for param in params:
        if "step" in optimizer.state[param]:
            optimizer.state[param]["step"] = torch.tensor(17.0)


def replace_state(optimizer: Any, params: list[Parameter], name: str) -> None:
    state = optimizer.state[params[2]]
    fresh = {key: same_random(value) for key, value in state.items() if key != "step"}
    kept = {key: value for key, value in state.items() if key == "step"}
    optimizer.state[params[2]] = kept | fresh


def empty_state(optimizer: Any, params: list[Parameter], name: str) -> None:
    optimizer.state[params[0]] = {}


def clear_state(optimizer: Any, params: list[Parameter], name: str) -> None:
    optimizer.state[params[1]].clear()


def delete_state(optimizer: Any, params: list[Parameter], name: str) -> None:
    del optimizer.state[params[1]]


def delete_all(optimizer: Any, params: list[Parameter], name: str) -> None:
    optimizer.state.clear()


def new_dict(optimizer: Any, params: list[Parameter], name: str) -> None:
    optimizer.state = defaultdict(dict)


def swap_states(optimizer: Any, params: list[Parameter], name: str) -> None:
    """Two of the same shape change places."""
    one, other = params[3], params[5]
    optimizer.state[one], optimizer.state[other] = optimizer.state[other], optimizer.state[one]


def new_data(optimizer: Any, params: list[Parameter], name: str) -> None:
    for param in params:
        param.data = same_random(param.data)


def new_data_once(optimizer: Any, params: list[Parameter], name: str) -> None:
    params[4].data = same_random(params[4].data)


def new_layout(optimizer: Any, params: list[Parameter], name: str) -> None:
    params[1].data = params[1].data.t().contiguous().t()


def changed_data(optimizer: Any, params: list[Parameter], name: str) -> None:
    with torch.no_grad():
        for param in params:
            param.mul_(0.5)


def shared(optimizer: Any, params: list[Parameter], name: str) -> None:
    for param in params:
        param.share_memory_()


def replace_parameter(optimizer: Any, params: list[Parameter], name: str) -> None:
    """As programs do whose parameters grow: a longer one takes over, with a longer state."""
    old = params[0]
    params[0] = parameter(torch.cat([old.detach(), same_random(old.detach())]))
    params[0].grad_dtype = None
    optimizer.param_groups[0]["params"][0] = params[0]
    optimizer.state[params[0]] = {
        key: torch.cat([value, torch.zeros_like(value)]) if key != "step" else value
        for key, value in optimizer.state.pop(old).items()
    }


def replace_parameter_only(optimizer: Any, params: list[Parameter], name: str) -> None:
    params[1] = parameter(same_random(params[1].detach()))
    optimizer.param_groups[0]["params"][1] = params[1]


def replace_list(optimizer: Any, params: list[Parameter], name: str) -> None:
    params[:] = [params[2], params[0], parameter(same_random(params[1].detach()))]
    optimizer.param_groups[0]["params"] = list(params)


def remove_parameter(optimizer: Any, params: list[Parameter], name: str) -> None:
    params[0].grad = None
    removed = optimizer.param_groups[0]["params"].pop(0)
    assert removed is params.pop(0)
    optimizer.state.pop(removed)


def move_to_other_group(optimizer: Any, params: list[Parameter], name: str) -> None:
    moved = optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [moved], "lr": 0.2})


def reorder(optimizer: Any, params: list[Parameter], name: str) -> None:
    optimizer.param_groups[0]["params"].reverse()


CHANGES: list[Callable[[Any, list[Parameter], str], None]] = [
    *(replace_values, replace_one_value, change_in_place, replace_layout, replace_step),
    *(replace_state, empty_state, clear_state, delete_state, delete_all, new_dict, swap_states),
    *(new_data, new_data_once, new_layout, changed_data, shared),
    *(replace_parameter, replace_parameter_only, replace_list, remove_parameter),
    *(move_to_other_group, reorder),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize(("name", "options", "state"), RULES, ids=["AdamW", "SGD", "RMSprop"])
def test_change(
    name: str,
    options: dict[str, Any],
    state: str,
    change: Callable[[Any, list[Parameter], str], None],
):
    twins = Twins(name, **options)
    for params, optimizer in zip(twins.params, (twins.ours, twins.theirs), strict=True):
        params.append(parameter(same_random(params[3].detach())))  # of the same shape as another
        optimizer.add_param_group({"params": params[-1:]})
    twins.step()
    twins.step()
    change(twins.ours, twins.params[0], state)
    change(twins.theirs, twins.params[1], state)
    for _ in range(3):
        twins.step()
        twins.check()


@pytest.mark.parametrize("name", FUSED)
def test_new_data_moves_all_rules(name: str):
    """The new memory is updated, and the old one left alone."""
    param = parameter(randn([40], F32, torch.Generator().manual_seed(0)))
    optimizer = FUSED[name]([param], lr=0.1)
    for _ in range(2):
        param.grad = torch.randn(40)
        optimizer.step()
        old, new = param.data, torch.randn(40)
        before_old, before_new = bits(old), bits(new)
        param.data = new
        optimizer.step()
        assert bits(old) == before_old
        assert bits(new) != before_new


@pytest.mark.parametrize("way", ["copy_", "data"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("master", ["fp32", "remainder16"])
def test_values_written_beside_a_master(master: str, dtype: torch.dtype, way: str):
    """As by model.load_state_dict: the next step goes on from them, not from the old master."""
    if (dtype, master) == (F16, "remainder16"):
        return
    param = parameter(torch.rand(50).to(dtype))
    optimizer = FUSED["AdamW"]([param], lr=1e-4, master=master)
    param.grad = torch.randn(50)
    optimizer.step()
    written = (10 + torch.rand(50)).to(dtype)
    with torch.no_grad():
        if way == "copy_":
            param.copy_(written)
        else:
            param.data = written.clone()
    optimizer.step()
    assert (param - written).abs().max() <= 0.07  # a unit in the last place of bfloat16


def test_states_of_no_parameter_stay():
    """Users keep things of their own in an optimizer's state."""
    param = parameter(torch.randn(3))
    optimizer = FUSED["Adam"]([param])
    param.grad = torch.randn(3)
    optimizer.state[param]["note"] = "mine"
    optimizer.state["global"] = {"epoch": 3}
    optimizer.step()
    optimizer.step()
    assert optimizer.state[param]["note"] == "mine"
    assert optimizer.state["global"] == {"epoch": 3}
    assert optimizer.state[param]["step"] == 2


@pytest.mark.parametrize("name", FUSED)
def test_nothing_to_do(name: str):
    """Groups without parameters, parameters without gradients."""
    optimizer = FUSED[name]([{"params": []}, {"params": []}])
    optimizer.step()
    param = parameter(torch.randn(3))
    optimizer.add_param_group({"params": [param]})
    optimizer.step()
    before = everything(optimizer)
    optimizer.step()
    assert everything(optimizer) == before
    param.grad = torch.randn(3)
    optimizer.step()
    assert everything(optimizer) != before


@pytest.mark.parametrize("name", ["AdamW", "SGD", "LAMB"])
def test_averaged_model(name: str):
    """SWA and EMA see each update, and do not disturb it."""
    torch.manual_seed(6)
    model = torch.nn.Linear(6, 4)
    alone = copy.deepcopy(model)
    optimizers = [FUSED[name](each.parameters(), lr=0.05) for each in (model, alone)]
    swa = AveragedModel(model)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    schedulers = [SWALR(each, swa_lr=0.01, anneal_epochs=3) for each in optimizers]
    seen = []
    for _ in range(5):
        x = torch.randn(8, 6)
        for each, optimizer, scheduler in zip((model, alone), optimizers, schedulers, strict=True):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
            scheduler.step()
        swa.update_parameters(model)
        ema.update_parameters(model)
        seen.append(model.weight.detach().clone())
    assert bits(list(model.parameters())) == bits(list(alone.parameters()))
    torch.testing.assert_close(swa.module.weight, torch.stack(seen).mean(0))
    average = seen[0]
    for value in seen[1:]:
        average = (average + value) / 2
    torch.testing.assert_close(ema.module.weight, average)


def test_clipping_between_backward_and_step():
    twins = Twins("SGD", lr=0.1)
    for _ in range(3):
        twins.make_grads()
        for params in twins.params:
            torch.nn.utils.clip_grad_norm_(params, 0.5)
        twins.ours.step()
        twins.theirs.step()
    twins.check()


def test_one_optimizer_per_parameter_inside_backward():
    """Gradients are used and freed while the backward goes on."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(*[torch.nn.Linear(5, 5) for _ in range(3)])
    plain = copy.deepcopy(model)
    each = {param: FUSED["AdamW"]([param], lr=0.02) for param in model.parameters()}
    together = FUSED["AdamW"](plain.parameters(), lr=0.02)

    def step(param: Tensor) -> None:
        each[param].step()
        each[param].zero_grad()

    for param in each:
        param.register_post_accumulate_grad_hook(step)
    for _ in range(4):
        x = torch.randn(3, 5)
        model(x).square().mean().backward()
        plain(x).square().mean().backward()
        together.step()
        together.zero_grad()
        assert all(param.grad is None for param in model.parameters())
    assert bits(list(model.parameters())) == bits(list(plain.parameters()))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_grad_modes(mode: Callable[[], Any]):
    twins = Twins("AdamW")
    twins.step()
    with mode():
        twins.ours.step()
    twins.theirs.step()
    twins.step()
    twins.check()
    assert all(param.is_leaf and param.grad_fn is None for param in twins.params[0])


def test_gradients_that_require_grad():
    """After a backward with create_graph=True."""
    param = parameter(torch.randn(4, dtype=F64))
    other = parameter(param.detach().clone())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the cycle that create_graph makes
        for each in (param, other):
            (each**3).sum().backward(create_graph=True)
    FUSED["SGD"]([param], lr=0.1).step()
    torch.optim.SGD([other], lr=0.1).step()
    torch.testing.assert_close(param, other)


@pytest.mark.parametrize("options", [{}, {"master": "remainder16"}], ids=str)
def test_memory_is_given_back(options: dict[str, Any]):
    """Nothing holds parameters, gradients or states once the optimizer and the model are gone."""
    param = Parameter(torch.randn(9).to(BF16))
    optimizer = FUSED["AdamW"]([param], **options)
    param.grad = torch.randn(9).to(BF16)
    optimizer.step()
    grad = weakref.ref(param.grad)
    optimizer.zero_grad()
    assert grad() is None, "the gradient is held after zero_grad"
    held = [weakref.ref(value) for value in (param, optimizer.state[param]["exp_avg"])]
    del param, optimizer
    gc.collect()
    assert [each() for each in held] == [None, None]
