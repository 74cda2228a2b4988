"""Two kernels and a few operations of torch give the same decision on a step."""

import math
import os
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from flodl.train.step import decide
from flodl.train.step.decide import GradientCheck

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None, reason="needs Triton's interpreter"
)
SHAPES = [(3,), (7, 5), (), (2, 4096), (4097,), (1, 9)]


def make_judge(*, kernels: bool, device: torch.device = CPU, **options) -> GradientCheck:
    check = GradientCheck(device, **options)
    check._kernels = None
    if kernels:
        check._kernels = decide.load_kernels()
    return check


def gradients(bad=None, dtype=torch.float32, device=CPU):
    g = torch.Generator().manual_seed(1)
    found = [torch.randn(shape, generator=g).to(dtype) for shape in SHAPES]
    found.append(torch.randn(6, 4, generator=g).to(dtype).t())
    found.append(torch.randn(4099, generator=g).to(dtype)[3:])  # where no 16 bytes can be read at once
    if bad is not None:
        found[3].view(-1)[5000] = bad
    return [part.to(device) for part in found]


def told(decision):
    """Return whether the step is left out, what gradients are divided by, loss and norm."""
    loss, norm, *rest = decision.figures.tolist()
    return float(decision.found), None if decision.scale is None else float(decision.scale), loss, norm, rest


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [None, 0.5, 1e9])
def test_what_is_not_finite_is_found_and_norms_are_norms(bad, clip):
    check = make_judge(kernels=False, max_grad_norm=clip)
    left_out, scale, loss, norm, _ = told(check(gradients(bad), torch.tensor(2.5), 8.0))
    whole = float(torch.cat([g.reshape(-1) for g in gradients(bad)]).norm())
    assert left_out == (bad is not None)
    assert loss == 2.5
    if bad is None:
        assert norm == pytest.approx(whole, rel=1e-6)
        assert scale == (None if clip is None else pytest.approx(max(1.0, (whole + 1e-6) / clip), rel=1e-6))


@pytest.mark.parametrize("clip", [None, 0.5, 1e9])
def test_a_gradient_that_is_a_sum_is_judged_and_clipped_as_the_mean_that_it_will_be(clip):
    check, count = make_judge(kernels=False, max_grad_norm=clip), torch.tensor(4.0)
    _, scale, _, norm, _ = told(check(gradients(), torch.tensor(2.5), count, summed=True))
    divided = [g / 4.0 for g in gradients()]
    _, wanted, _, mean_norm, _ = told(check(divided, torch.tensor(2.5), count))
    assert norm == pytest.approx(mean_norm, rel=1e-6)
    assert scale == pytest.approx(4.0 * (wanted or 1.0), rel=1e-6)


CASES = [
    {
        "sticky": sticky,
        "max_grad_norm": clip,
        "bad": bad,
        "loss": loss,
        "count": count,
        "dtype": dtype,
        "summed": summed,
        "further": further,
    }
    for summed in (False, True)
    for sticky, clip in ((True, None), (False, 0.5))
    for bad, loss in ((None, 1.25), (math.nan, 1.25), (None, math.nan), (math.inf, 1.25))
    for count, dtype, further in ((8.0, torch.float32, 0), (8, torch.float32, 17), (0, torch.bfloat16, 3))
    if not summed or isinstance(count, int)
]


def follow(check, case, device):
    """Return what is told of a step as in the case, and of a sound one after it."""
    count = torch.tensor(case["count"], device=device) if isinstance(case["count"], int) else case["count"]
    found = []
    for bad, loss in ((case["bad"], case["loss"]), (None, 0.75)):
        grads = gradients(bad, case["dtype"], device)
        further = torch.arange(case["further"], dtype=torch.float64, device=device) if case["further"] else None
        given = {"summed": case["summed"], "rest": further}
        decision = check(grads, torch.tensor(loss, device=device), count, **given)
        left_out, scale, *figures, rest = told(decision)
        assert rest == [*([float(count)] if isinstance(count, torch.Tensor) else []), *range(case["further"])]
        found.append([left_out, scale or 1.0 if left_out == 0 else 0.0, *figures])
    return found


def compare(device):
    for case in CASES:
        options = {"sticky": case["sticky"], "max_grad_norm": case["max_grad_norm"], "device": device}
        check = make_judge(kernels=True, **options)
        ours = follow(check, case, device)
        assert len(check.tables.layouts) == 1  # the kernels were asked
        plain = follow(make_judge(kernels=False, **options), case, device)
        for a, b in zip(ours, plain, strict=True):
            assert a == pytest.approx(b, rel=1e-5 if case["dtype"] == torch.float32 else 1e-2, nan_ok=True), case


@interpreted
def test_kernels_decide_as_torch_does():
    compare(CPU)


@interpreted
def test_room_for_the_addresses_of_a_capture_is_made_before_it(monkeypatch):
    check = make_judge(kernels=True)
    told(check(gradients(), torch.tensor(0.0), 1.0))
    (plan,) = check.tables.layouts.values()
    (room,) = plan.spare
    monkeypatch.setattr(decide, "capturing", lambda device: True)
    grads = gradients()
    addresses = np.asarray([[g.data_ptr() for g in grads]])
    assert check.tables.table(plan, addresses) is room
    assert check._layout_of(grads) is None  # a second one has no room yet
    held = check.tables.finish_capture()
    assert room.tolist() == addresses.tolist()
    assert held
    assert check._layout_of(grads) is plan
    assert plan.spare[0] is not room


@pytest.mark.gpu
def test_kernels_decide_as_torch_does_on_a_gpu():
    device = torch.device("cuda", 0)
    assert decide._kernels(device) is not None
    compare(device)


@pytest.mark.gpu
def test_a_capture_of_the_kernels_reads_its_own_gradients():
    device = torch.device("cuda", 0)
    check = GradientCheck(device)
    grads = gradients(device=device)
    loss = torch.zeros((), device=device)
    want = told(check(grads, loss, 1.0))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # What is free again before the kernels run gives its memory to whatever comes next, at each replay.
        freed = [torch.full((64 << i,), 1.0, device=device) for i in range(8)]
        del freed
        doubled = [2 * g for g in grads]
        decision = check(doubled, loss, 1.0)
    held = check.tables.finish_capture()
    graph.replay()
    assert told(decision)[3] == pytest.approx(2 * want[3], rel=1e-6)
    for g in grads:
        g.mul_(3)
    graph.replay()
    assert told(decision)[3] == pytest.approx(6 * want[3], rel=1e-6)
    assert held


def test_a_gradient_with_gaps_is_none_for_the_kernels():
    check = make_judge(kernels=False)
    assert check._layout_of([torch.zeros(4, 4)[:, :2]]) is None
    assert check._layout_of([torch.zeros(2, dtype=torch.float64)]) is None
    assert check._layout_of([torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)]) is None
    assert check._layout_of([torch.zeros(4, 6).t(), torch.zeros(())]) is not None
