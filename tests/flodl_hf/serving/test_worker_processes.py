"""The workers of a server without their processes: how many there are, and which take the place of those that end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from flodl.errors import ConfigError
from flodl_hf.errors import PredictError
from flodl_hf.families.schema.tasks import HEADS
from flodl_hf.serving import served
from flodl_hf.serving.settings import Settings
from flodl_hf.serving.tasks import check_head
from flodl_hf.serving.workers import Process, Processes, Workers, WorkersError


def test_a_gpu_with_memory_for_it_has_a_second_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def one(self: Processes, device: str, adapters: Any) -> Any:
        asked.append(device)
        if asked.count("cuda:1") == 2 and device == "cuda:1":
            raise WorkersError("no memory", device=device)
        info = {"room": device != "cuda:2", "ready": {}, "max_batch_tokens": 1, "device": device}
        nobody: Any = None
        return Process(nobody, info, 2.0, device=device, child=nobody)

    monkeypatch.setattr(Processes, "_one", one)

    def started(**settings: Any) -> list[str]:
        asked.clear()
        workers = Workers(Settings(models=served(["m"]), **settings), lambda ran, queued: None)
        asyncio.run(Processes(workers.settings, workers).load())
        assert workers.rate == 2.0 * len(workers.active)
        return [worker.info["device"] for worker in workers.active]

    devices = ("cuda:0", "cuda:1", "cuda:2")
    # That the other does not start is no reason to serve nothing.
    assert started(devices=devices) == [*devices, "cuda:0"]
    assert started(devices=devices, workers=1) == list(devices)
    assert started(devices=("cuda:0",), workers=3) == ["cuda:0"] * 3
    with pytest.raises(ConfigError, match="workers=0"):
        Settings(models=served(["m"]), workers=0)


class _Made:
    """Workers without processes: each is there at once, and ends when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Any] = []
        self.gates: list[asyncio.Event] = []
        self.ends_at_once = 0
        monkeypatch.setattr(Processes, "_one", lambda processes, device, adapters: self._one(device))

    async def _one(self, device: str) -> Process:
        if self.gates:
            await self.gates.pop(0).wait()
        closed = asyncio.get_running_loop().create_future()

        def end() -> None:
            if not closed.done():
                closed.set_result(None)

        async def reaped() -> int:
            assert closed.done()
            return 9

        info = {"room": False, "ready": {}, "max_batch_tokens": 1, "device": device, "pid": len(self.made)}
        link: Any = SimpleNamespace(closed=closed, close=end)
        child: Any = SimpleNamespace(reaped=reaped, end=lambda: "ended")
        self.made.append(Process(link, info, 2.0, device=device, child=child))
        if len(self.made) <= self.ends_at_once:
            end()
        return self.made[-1]


async def _settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def test_a_worker_that_ends_before_it_is_asked_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        made = _Made(monkeypatch)
        made.ends_at_once = 1
        workers = Workers(Settings(models=served(["m"]), devices=("cpu",), workers=2), lambda ran, queued: None)
        processes = Processes(workers.settings, workers)
        await processes.load()
        await _settled()
        assert [worker.info["pid"] for worker in workers.active] == [1, 2]
        assert (processes.restarts, workers.ready.is_set()) == (1, True)
        # Of those that are loaded anew too.
        made.ends_at_once = 4
        await processes.load()
        await _settled()
        assert [worker.info["pid"] for worker in workers.active] == [4, 5]
        assert [one.link.closed.done() for one in made.made] == [True] * 4 + [False] * 2
        await processes.close()
        assert all(one.link.closed.done() for one in made.made)
        assert not workers.ready.is_set()

    asyncio.run(run())


def test_a_worker_that_is_started_again_goes_when_all_are_loaded_anew_or_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        made = _Made(monkeypatch)
        workers = Workers(Settings(models=served(["m"]), devices=("cpu",)), lambda ran, queued: None)
        processes = Processes(workers.settings, workers)
        await processes.load()
        # It ends while all are loaded anew; the one in its place comes when those are there.
        new, again = made.gates = [asyncio.Event(), asyncio.Event()]
        reloading = asyncio.ensure_future(processes.load())
        await _settled()
        made.made[0].link.close()
        await _settled()
        new.set()
        await reloading
        again.set()
        await _settled()
        assert len(made.made) == 3
        assert [worker.info["pid"] for worker in workers.active] == [1]
        assert [one.link.closed.done() for one in made.made] == [True, False, True]
        # It ends, and so does the server, while another is being started.
        made.gates = [again := asyncio.Event()]
        made.made[1].link.close()
        await _settled()
        assert [worker.info["pid"] for worker in workers.active] == []
        await processes.close()
        again.set()
        await _settled()
        assert len(made.made) == 3

    asyncio.run(run())


def test_a_model_whose_head_no_path_answers_is_refused_by_its_name() -> None:
    answered = "base, sequence_classification, token_classification, question_answering, masked_lm"
    for head in HEADS:
        if head.name in answered.split(", "):
            check_head("mine", head.name)
            continue
        with pytest.raises(PredictError, match=f"mine: found the head {head.name}, .* expected one of {answered}"):
            check_head("mine", head.name)
