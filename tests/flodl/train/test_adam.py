"""Our kernels of Adam and AdamW: when they take over from torch's, and that they have its bits."""

import pytest
import torch
from torch import nn

from flodl.train.step import adam
from flodl.train.step.adam import AdamUpdate

CPU = torch.device("cpu")


def made(kind=torch.optim.AdamW, **options):
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), **{"lr": torch.tensor(1e-3), "fused": True, **options})
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    return model, optimizer


def test_a_processor_is_left_to_torch():
    _, optimizer = made()
    assert not AdamUpdate(CPU)(optimizer, torch.zeros(()), None)


def test_what_was_never_moved_has_no_averages_yet():
    _, optimizer = made()
    group = optimizer.param_groups[0]
    assert adam._tensors_of(optimizer, group) is None
    optimizer.step()
    assert [len(part) for part in adam._tensors_of(optimizer, group) or []] == [2] * 5


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"maximize": True}, {"lr": 1e-3}], ids=str)
def test_options_without_a_kernel_are_torchs(options):
    _, optimizer = made(**options)
    optimizer.step()
    assert adam._tensors_of(optimizer, optimizer.param_groups[0]) is None


def test_whoever_watches_or_replaces_the_step_gets_torchs():
    _, optimizer = made()
    assert adam._is_plain(optimizer)
    handle = optimizer.register_step_post_hook(lambda *args: None)
    assert not adam._is_plain(optimizer)
    handle.remove()
    assert adam._is_plain(optimizer)
    vars(optimizer)["step"] = lambda: None
    assert not adam._is_plain(optimizer)
    assert not adam._is_plain(torch.optim.SGD([nn.Parameter(torch.ones(1))]))


def test_places_are_told_from_the_first_parameter_and_say_which_are_even():
    model, optimizer = made()
    optimizer.step()
    tensors = adam._tensors_of(optimizer, optimizer.param_groups[0])
    assert tensors is not None
    rows = adam._places(tensors)
    first = model.weight.data_ptr()
    assert rows.shape == (6, 2)
    for row, part in zip(rows[:4], tensors, strict=False):
        assert [first + 4 * place for place in row] == [t.data_ptr() for t in part]
    assert rows[4, 1] == 0  # two numbers are no multiple of four
    assert [*rows[5]] == [t.data_ptr() for t in tensors[4]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_they_have_the_bits_of_torchs_kernels():
    assert adam.powers_of(torch.device("cuda", 0)) in ("float64", "float32")
