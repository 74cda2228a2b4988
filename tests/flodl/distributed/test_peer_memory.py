"""Whether two GPUs may sum gradients through each other's memory, and that a run says by what it sums and why."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flodl.data import TensorRows
from flodl.distributed import Ranks, gradients, launch, peer_memory
from flodl.distributed.gradients import GradientSum
from flodl.distributed.group import Summed
from flodl.distributed.peer_memory import SWITCH, PeerAccessError, PeerBuffer, peer_access_error
from flodl.train import RunDone, Trainer, adamw
from flodl.train.settings import Precision
from flodl.train.step.device import Step

torch.set_num_threads(1)
CUDA = torch.device("cuda", 0)
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


class Said(Ranks):
    """One of two ranks on GPUs; what the other says is made of what this one says."""

    def gather(self, value: Any) -> list[Any]:
        return [value, self.other(list(value))]

    other = staticmethod(lambda row: [*row[:2], "another", row[3]])


def between(monkeypatch: pytest.MonkeyPatch, other: Any, tried: Any = lambda ranks: None) -> str | None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="one"))
    monkeypatch.setattr(peer_memory, "_try", tried)
    ranks = Said(world=2, device=CUDA)
    ranks.other = other  # type: ignore[method-assign]
    return peer_access_error(ranks)


def fails(ranks: Ranks) -> None:
    raise PeerAccessError("rank 1: RuntimeError: no access")


def test_why_two_gpus_do_not_write_into_each_others_memory_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    assert between(monkeypatch, Said.other) is None
    assert between(monkeypatch, lambda row: ["elsewhere", *row[1:]]) == "the ranks are on different hosts"
    assert between(monkeypatch, lambda row: row) == "both ranks have the same device"
    assert between(monkeypatch, lambda row: [*row[:2], "another", "0"]) == "FLODL_PEER_MEMORY is 0"
    assert between(monkeypatch, Said.other, fails) == "rank 1: RuntimeError: no access"
    monkeypatch.setenv(SWITCH, "0")
    assert between(monkeypatch, Said.other) == "FLODL_PEER_MEMORY is 0"
    assert peer_access_error(Ranks(world=3, device=CUDA)) == "peer memory joins two ranks, and there are 3"
    assert peer_access_error(Ranks(world=2)) == "peer memory joins CUDA devices, and this is a cpu"


def on_one_alone(ranks: Ranks) -> list[str]:
    found = []
    for bad in ((1,), (0, 1), ()):
        try:
            with peer_memory._together(ranks):
                if ranks.rank in bad:
                    raise ValueError(f"no memory at {ranks.rank}\nand more")
            found.append("went well")
        except PeerAccessError as fault:
            found.append(str(fault))
    return found


def test_what_fails_on_one_rank_fails_on_both_with_its_reason() -> None:
    one, both = "rank 1: ValueError: no memory at 1", "rank 0: ValueError: no memory at 0; "
    assert launch(on_one_alone, ranks=2, start="fork").wait() == [[one, both + one, "went well"]] * 2


def on_gpus(**settings: Any) -> tuple[GradientSum, nn.Sequential]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return GradientSum(Ranks(world=2, device=CUDA), model, **settings), model


def test_sums_of_gpus_say_by_what_and_why() -> None:
    assert str(on_gpus()[0].summed) == "NCCL: steps are not recorded"
    assert str(on_gpus(on_cpu=True)[0].summed).startswith("gloo: they travel through host memory")
    assert GradientSum(Ranks(world=3, device=CUDA), nn.Linear(1, 1)).summed == Summed(
        "NCCL", "peer memory joins two ranks, and there are 3"
    )
    assert GradientSum(Ranks(), nn.Linear(1, 1)).summed is None
    sums, _ = on_gpus()
    sums.prepare_capture(fault=f"{SWITCH} is 0")
    assert str(sums.summed) == "NCCL: FLODL_PEER_MEMORY is 0"


def test_where_room_goes_out_while_a_run_goes_on_it_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(ranks: Ranks, tensors: list[torch.Tensor]) -> str:
        if len(tensors[0]) > 20:
            raise PeerAccessError("rank 1: OutOfMemoryError: CUDA out of memory")
        return "a room"

    monkeypatch.setattr(gradients, "PeerBuffer", make)
    said: list[str] = []
    sums, model = on_gpus()
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    sums.prepare_capture(fault=None, tell=said.append)
    assert (str(sums.summed), sums.room, said) == ("peer memory", "a room", [])
    for _ in range(2):
        model.requires_grad_(True)
        assert sums.refresh_buckets()
        assert sums.room is None
        assert str(sums.summed).startswith("NCCL: gradients do not fit into peer memory (rank 1: OutOfMemory")
        model[0].requires_grad_(False)
        sums.refresh_buckets()
    assert len(said) == 1
    assert "rank 1: OutOfMemoryError" in said[0]
    assert "FLODL_PEER_MEMORY=0" in said[0]


@pytest.mark.parametrize("before", [None, "0"])
def test_memory_is_shared_without_multicast(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    from torch._C._distributed_c10d import _SymmetricMemory

    seen: list[str | None] = []

    def empty(size: tuple[int], stride: tuple[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def rendezvous(memory: torch.Tensor, group: str) -> str:
        seen.append(os.environ.get(peer_memory.NO_MULTICAST))
        if len(seen) > 1:
            raise RuntimeError("CUDA driver error: invalid argument\nat a line of torch")
        return "a handle"

    monkeypatch.delenv(peer_memory.NO_MULTICAST, raising=False)
    if before is not None:
        monkeypatch.setenv(peer_memory.NO_MULTICAST, before)
    monkeypatch.setattr(_SymmetricMemory, "empty_strided_p2p", staticmethod(empty))
    monkeypatch.setattr(_SymmetricMemory, "rendezvous", staticmethod(rendezvous))
    monkeypatch.setattr(peer_memory.dist, "group", SimpleNamespace(WORLD=SimpleNamespace(group_name="0")))
    memory, handle = peer_memory._shared_memory(Ranks(), 48)
    assert (len(memory), handle) == (48, "a handle")
    with pytest.raises(PeerAccessError, match=r"^rank 0: RuntimeError: CUDA driver error: invalid argument$"):
        peer_memory._shared_memory(Ranks(), 48)
    assert seen == ["1", "1"]
    assert os.environ.get(peer_memory.NO_MULTICAST) == before


def test_buckets_for_which_there_are_no_signals_are_refused() -> None:
    with pytest.raises(PeerAccessError, match="there are 200 buckets"):
        PeerBuffer(Ranks(world=2, device=CUDA), [torch.zeros(1)] * 200)


def linear(device: torch.device) -> nn.Module:
    return nn.Linear(3, 2)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["x"]).square().mean()


@pytest.mark.parametrize(("share", "sharded"), [(True, False), (False, False), (True, True)])
def test_steps_that_sum_no_gradients_say_nothing(share: bool, sharded: bool) -> None:
    model = nn.Linear(2, 1)
    given: dict[str, Any] = {"precision": Precision("fp32", CUDA), "share_gradients": share, "sharded": sharded}
    of_two, alone = (
        Step(model, torch.optim.SGD(model.parameters(), lr=1.0), None, ranks=ranks, **given).summed
        for ranks in (Ranks(world=2, device=CUDA), Ranks())
    )
    assert alone is None
    assert (of_two is None) == (not share)
    assert ("sharded" in str(of_two)) == sharded


@TWO
@pytest.mark.gpu
@pytest.mark.parametrize("switch", ["1", "0"])
def test_on_two_gpus_a_run_says_by_what_gradients_were_summed(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    monkeypatch.setenv(SWITCH, switch)
    found: list[Any] = []
    rows = TensorRows({"x": torch.ones(64, 3)})
    built = Trainer.builder(linear, adamw(1e-2), loss).dataset(rows).batch_size(4).policy("sync").num_epochs(1)
    built.devices(2).subscribe(found.append, RunDone).run()
    assert str(found[0].summed) == ("peer memory" if switch == "1" else "NCCL: FLODL_PEER_MEMORY is 0")
