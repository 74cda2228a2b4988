"""An update goes from the largest parameter to the smallest, and nothing else about it changes."""

import pytest
import torch
from torch import nn

from flodl.train.step.update import largest_first


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 50))
    groups = [{"params": list(model[0].parameters())}, {"params": [*model[1].parameters(), *model[2].parameters()]}]
    return model, torch.optim.Adam(groups, lr=0.1, fused=True)


def test_bits_and_saved_state_are_those_of_the_given_order():
    found = []
    for ordered in (True, False):
        model, optimizer = made()
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter) * parameter.detach().abs()
            if ordered:
                with largest_first(optimizer):
                    sizes = [[p.numel() for p in group["params"]] for group in optimizer.param_groups]
                    optimizer.step()
            else:
                optimizer.step()
        found.append((model.state_dict(), optimizer.state_dict()))
    assert sizes == [[12, 3], [150, 50, 3, 3]]
    (weights, state), (right, wanted) = found
    assert all(torch.equal(weights[name], right[name]) for name in right)
    assert state["param_groups"] == wanted["param_groups"]
    for number, values in wanted["state"].items():
        assert all(torch.equal(state["state"][number][name], value) for name, value in values.items())


def test_the_order_is_put_back_when_the_update_fails():
    _, optimizer = made()
    before = [list(group["params"]) for group in optimizer.param_groups]
    with pytest.raises(RuntimeError, match="no"), largest_first(optimizer):
        raise RuntimeError("no")
    for group, parameters in zip(optimizer.param_groups, before, strict=True):
        assert all(a is b for a, b in zip(group["params"], parameters, strict=True))
