"""Our kernels of Adam and AdamW: when they take over from torch's, and that they have its bits."""

import os
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from flodl.train.step import decide
from flodl.train.step import update as adam
from flodl.train.step.host import has_plain_step, take_step
from flodl.train.step.update import AdamUpdate

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None, reason="needs Triton's interpreter"
)


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


def test_a_step_with_hooks_or_replaced_is_torchs():
    _, optimizer = made()
    assert has_plain_step(optimizer)
    handle = optimizer.register_step_post_hook(lambda *args: None)
    assert not has_plain_step(optimizer)
    handle.remove()
    assert has_plain_step(optimizer)
    vars(optimizer)["step"] = lambda: None
    assert not has_plain_step(optimizer)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adafactor])
def test_a_step_without_torchs_compiler_has_the_same_bits(kind, monkeypatch):
    monkeypatch.setattr("flodl.train.step.host.sys", SimpleNamespace(modules={}))
    found = []
    for take in (kind.step, take_step):
        parameter = nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))
        optimizer = kind([parameter], lr=0.01)
        for _ in range(3):
            parameter.grad = parameter.detach().sin()
            take(optimizer)
        found.append(parameter.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("begins", [0, 1])
def test_places_are_told_from_a_parameter_that_is_even_and_say_which_are(begins):
    held = torch.ones(64)
    model = nn.ParameterList([held[begins : begins + 6], torch.ones(64)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3), fused=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    tensors = adam._tensors_of(optimizer, optimizer.param_groups[0])
    assert tensors is not None
    rows = adam._places(tensors)
    base = tensors[0][1].data_ptr()
    assert base % 16 == 0
    assert rows.shape == (6, 2)
    for row, part in zip(rows[:4], tensors, strict=False):
        assert [base + 4 * place for place in row] == [t.data_ptr() for t in part]
        assert row[1] % 4 == 0
    assert [*rows[4]] == [0, 1]  # six numbers are no multiple of four
    assert [*rows[5]] == [t.data_ptr() for t in tensors[4]]


KINDS = [torch.optim.Adam, torch.optim.AdamW]


def test_parts_of_one_size_have_rooms_of_their_own_when_captured(monkeypatch):
    update = AdamUpdate(CPU)
    _, optimizer = made()
    optimizer.step()
    group = optimizer.param_groups[0]
    tensors = adam._tensors_of(optimizer, group) or []
    rooms = [update._ready(group, tensors, number) for number in (0, 1)]
    assert all(room is not None and room[0].spare for room in rooms)
    for module in (adam, decide):
        monkeypatch.setattr(module, "capturing", lambda device: True)
    again = [update._ready(group, tensors, number) for number in (0, 1)]
    assert [room[0] for room in again if room] == [room[0] for room in rooms if room]
    assert rooms[0] is not None
    rooms[0][0].spare.clear()
    assert update._ready(group, tensors, 0) is None
    assert update._ready(group, tensors, 1) is not None
    assert update._ready(group, tensors, 2) is None


@pytest.mark.parametrize("kind", [True, False])
def test_a_trial_is_the_same_each_time_and_draws_nothing_of_the_run(kind):
    before = torch.get_rng_state()
    first, second = (adam._moved(CPU, adam.SHAPES[1], False, kind, True, True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    counts = [float(count) for count in first if count.ndim == 0]
    assert counts == [count + 2.0 for count in adam.COUNTS]  # one of three is left out
    assert len(adam.SHAPES[0]) == len(counts) > 30
    assert torch.equal(before, torch.get_rng_state())


def test_a_device_whose_bits_differ_is_left_to_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "flodl.train.step.adam_kernels", ModuleType("adam_kernels"))
    monkeypatch.setattr(adam, "_waiting_allowed", nullcontext)
    for differs in (False, True):
        numbers = iter([0.0, 0.0, 0.0, float(differs)])
        monkeypatch.setattr(adam, "_moved", lambda *args, numbers=numbers: [torch.tensor(next(numbers))])
        assert adam._try(CPU, True, True, False) is not differs


def test_what_captures_asks_for_nothing_new(monkeypatch):
    monkeypatch.setattr(adam, "capturing", lambda device: True)
    assert not adam.has_torch_bits(torch.device("cuda", 7), True, True, False)
    assert not [key for key in adam._KNOWN if key[0].index == 7]


AWKWARD = ((1,), (3,), (7, 5), (4,), (2, 1026), (2049,), (4096,))


@interpreted
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("decays", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
def test_kernels_move_every_element_as_torch_does(decoupled, decays, divided):
    theirs, ours = (adam._moved(CPU, AWKWARD, ours, decoupled, decays, divided) for ours in (False, True))
    for right, found in zip(theirs, ours, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-6)  # 1 - beta in float32 or float64
    counts = [float(found) for found in ours if found.ndim == 0]
    assert counts == [count + 2.0 for count in adam.COUNTS[: len(AWKWARD)]]  # one of three is left out


@interpreted
def test_what_moves_is_seen_to_have_been_written_to_and_what_is_left_out_stays():
    held = torch.ones(3, 30)
    model = nn.ParameterList([held[1, 1:14], held[2]])  # one begins where no 16 bytes can be read at once
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), fused=True)
    update, group = AdamUpdate(CPU), optimizer.param_groups[0]
    for turn in range(3):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        tensors = adam._tensors_of(optimizer, group)
        if tensors is None:
            optimizer.step()
            continue
        before, versions = [p.detach().clone() for p in model], [p._version for p in model]
        update._launch(group, tensors, update._ready(group, tensors), torch.tensor(float(turn == 2)), None)
        assert all(p._version > version for p, version in zip(model, versions, strict=True))
        assert [torch.equal(a, b) for a, b in zip(model, before, strict=True)] == [turn == 2] * 2
    assert bool((held[0] == 1).all())
    assert bool((held[1, 14:] == 1).all())
    assert held[1, 0] == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("decays", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
def test_tensors_of_every_kind_get_the_bits_of_torchs_kernels(decoupled, decays, divided):
    assert adam.has_torch_bits(torch.device("cuda", 0), decoupled, decays, divided)


def parameters_of(device):
    """Return parameters of many kinds, the same each time, and a tensor that some of them are parts of."""
    g = torch.Generator(device).manual_seed(1)
    shapes = (7, 3), (1,), (300, 1000), (200_003,), (64, 64)  # chunks of torch's kernels hold 65,536
    made = [torch.randn(shape, device=device, generator=g) for shape in shapes]
    held = torch.randn(4096, device=device, generator=g)
    # One begins where no 16 bytes can be read at once, one ends where none can be written.
    made[3:3] = [held[1:1025], held[2048:3071]]
    made.append(torch.randn(33, 20, device=device, generator=g).t())
    return [nn.Parameter(tensor) for tensor in made], held


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("by", [None, 7.3])
@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_many_kinds_are_moved_as_torch_moves_them(kind, by):
    device, both = torch.device("cuda", 0), []
    divisor = None if by is None else torch.tensor(by, device=device)
    for ours in (True, False):
        (params, held), update, taken = parameters_of(device), AdamUpdate(device), 0
        groups = [
            {"params": params[:3], "weight_decay": 0.1},
            {"params": params[3:7], "weight_decay": 0.0, "betas": (0.8, 0.99), "eps": 1e-6},
            {"params": params[7:], "weight_decay": 0.03, "lr": torch.tensor(3e-2, device=device)},
        ]
        optimizer = kind(groups, lr=torch.tensor(1e-2, device=device), fused=True, capturable=True)
        for turn in range(6):
            g = torch.Generator(device).manual_seed(turn)
            for p in params:
                p.grad = torch.empty_like(p).normal_(generator=g)
            found = torch.tensor(float(turn == 3), device=device)
            if ours and update(optimizer, found, divisor):
                taken += 1
                continue
            optimizer.found_inf, optimizer.grad_scale = found, divisor
            optimizer.step()
        assert taken == 5 * ours  # the first makes the state
        both.append([*params, held, *(t for p in params for t in optimizer.state[p].values())])
    assert all(map(torch.equal, *both))
