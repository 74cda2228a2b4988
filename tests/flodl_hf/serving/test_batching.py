"""The queue of a device: who runs next, what joins a batch, and what leaves it."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from flodl_hf.errors import PredictError
from flodl_hf.inference.batch import Pending, Scores
from flodl_hf.inference.options import RunOptions
from flodl_hf.inference.token_table import TokenTable
from flodl_hf.serving import batching
from flodl_hf.serving.batching import Batcher
from flodl_hf.serving.request import AwaitedResults, DeadlineError, GivenUpError, Signal, Turns, WorkerRequest
from flodl_hf.serving.worker import run_threads

BAD = 999


class Engine:
    """Gives each row the sum of its ids, or each token its id, and notes what ran; waits until it may."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.threads: list[int] = []
        self.begun = threading.Semaphore(0)
        self.may = threading.Event()
        self.may.set()

    def start(self, table: TokenTable, work: Any, places: Any) -> Pending:
        self.threads.append(threading.get_ident())
        self.begun.release()
        assert self.may.wait(60)
        firsts = table.ids[np.cumsum(table.lengths) - table.lengths]
        self.batches.append(firsts.tolist())
        if BAD in firsts:
            raise PredictError("a bad row")
        pending = Pending(len(table))
        # In two parts and not in order, as an engine's batches may be.
        order = np.argsort(-table.lengths, kind="stable")
        starts = np.cumsum(table.lengths) - table.lengths
        for rows in (order[::2], order[1::2]):
            if not len(rows):
                continue
            own = [table.ids[starts[r] : starts[r] + table.lengths[r]] for r in rows]
            if work.per_text:
                pending.add(rows, np.ones(len(rows), np.int64), torch.tensor([float(ids.sum()) for ids in own]), None)
            else:
                values = torch.from_numpy(np.concatenate(own).astype(np.float32))
                pending.add(rows, table.lengths[rows], values, None)
        return pending


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    found = Engine()
    monkeypatch.setattr(Batcher, "_engine", lambda self, key: found)
    return found


def rows(*lengths: int, first: int = 1) -> TokenTable:
    """Rows whose tokens all have the row's number, counted from ``first``."""
    sizes = np.array(lengths, np.int64)
    none = np.zeros(len(sizes), np.int64)
    ids = np.repeat(np.arange(first, first + len(sizes)), sizes).astype(np.int32)
    return TokenTable(
        ids, None, sizes, np.arange(len(sizes)), sizes, none, none, np.zeros(len(ids), np.int8), None, None, none
    )


def send(batcher: Batcher, table: TokenTable, request: WorkerRequest | None = None, per_text: bool = True) -> Pending:
    return batcher.send(request or WorkerRequest(), "model", RunOptions(), table, Scores(per_text), None)


@pytest.mark.parametrize("per_text", [True, False])
def test_each_call_has_its_own_rows_back(engine: Engine, per_text: bool) -> None:
    batcher = Batcher(torch.device("cpu"), 16)
    engine.may.clear()
    tables = [rows(3, 9, 1, first=1), rows(5, first=10), rows(2, 2, 30, 4, 4, first=20)]
    found = [send(batcher, table, per_text=per_text) for table in tables]
    engine.may.set()
    for table, pending in zip(tables, found, strict=True):
        starts = np.cumsum(table.lengths) - table.lengths
        own = [table.ids[a : a + n] for a, n in zip(starts, table.lengths, strict=True)]
        if per_text:
            assert pending.stacked().tolist() == [float(ids.sum()) for ids in own]
        else:
            assert [part.tolist() for part in pending.placed().rows(table)] == [ids.tolist() for ids in own]
    assert batcher.queued_tokens == 0


def test_rows_of_several_calls_share_batches_of_bounded_size(engine: Engine) -> None:
    batcher = Batcher(torch.device("cpu"), 40)
    engine.may.clear()
    first = send(batcher, rows(10))
    assert engine.begun.acquire(timeout=60)  # it runs by itself, and the others queue behind it
    others = [send(batcher, rows(10, first=100 + i)) for i in range(7)]
    engine.may.set()
    for pending in (first, *others):
        list(pending.parts())
    assert [len(batch) for batch in engine.batches] == [1, 4, 3]


def test_a_short_request_does_not_wait_for_all_of_a_long_one(engine: Engine) -> None:
    batcher = Batcher(torch.device("cpu"), 64)
    engine.may.clear()
    long = send(batcher, rows(*[32] * 100))
    assert engine.begun.acquire(timeout=60)
    short = send(batcher, rows(8, first=500))
    engine.may.set()
    list(short.parts())
    ran = next(i for i, batch in enumerate(engine.batches) if 500 in batch)
    assert ran <= 2
    list(long.parts())
    assert sum(map(len, engine.batches)) == 101


def test_a_key_with_many_requests_takes_nothing_from_another(engine: Engine) -> None:
    batcher = Batcher(torch.device("cpu"), 10)
    engine.may.clear()
    greedy = [send(batcher, rows(10, 10, first=1 + 2 * i), WorkerRequest("greedy")) for i in range(30)]
    modest = send(batcher, rows(*[10] * 5, first=900), WorkerRequest("modest"))
    engine.may.set()
    list(modest.parts())
    for pending in greedy:
        list(pending.parts())
    order = [batch[0] for batch in engine.batches]
    last = max(i for i, number in enumerate(order) if number >= 900)
    # In turns: not after the sixty rows that were there before.
    assert last <= 2 * 5 + 3


def test_what_is_given_up_leaves_the_queue(engine: Engine) -> None:
    batcher = Batcher(torch.device("cpu"), 10)
    engine.may.clear()
    running = send(batcher, rows(10))
    assert engine.begun.acquire(timeout=60)
    request, late = WorkerRequest(), WorkerRequest(until=time.monotonic() + 0.1)
    gone, slow = send(batcher, rows(10, first=300), request), send(batcher, rows(10, first=400), late)
    request.give_up()
    with pytest.raises(GivenUpError):
        list(gone.parts())
    with pytest.raises(DeadlineError):
        list(slow.parts())
    engine.may.set()
    list(running.parts())
    list(send(batcher, rows(10, first=5)).parts())
    assert [number for batch in engine.batches for number in batch] == [1, 5]
    assert batcher.queued_tokens == 0


def test_who_waits_for_a_batch_keeps_no_turn(engine: Engine) -> None:
    batcher = Batcher(torch.device("cpu"), 10)
    turns = Turns(1)
    request = WorkerRequest(turns=turns)
    engine.may.clear()
    waiting, done = threading.Event(), []

    def compute() -> None:
        with turns:
            pending = send(batcher, rows(10, first=3), request)
            waiting.set()
            done.append(pending.stacked().tolist())

    thread = threading.Thread(target=compute)
    thread.start()
    assert waiting.wait(10)
    with turns:  # it waits, and another has its turn
        engine.may.set()
        while not request.waits[0].is_set:
            time.sleep(0.001)
        assert not done  # the batch has run, and its thread waits until the turn is given back
    thread.join(10)
    assert done == [[30.0]]


def test_turns_of_late_and_served_waits_are_given_back() -> None:
    turns, inside, most = Turns(2), 0, 0
    lock, signals = threading.Lock(), [Signal() for _ in range(40)]
    arrived: list[bool] = []

    def compute(place: int) -> None:
        nonlocal inside, most
        with turns:
            found = turns.wait(signals[place], 0.02 if place % 2 else 10)
            with lock:
                arrived.append(found == (place % 2 == 0))
                inside += 1
                most = max(most, inside)
            time.sleep(0.002)
            with lock:
                inside -= 1

    threads = [threading.Thread(target=compute, args=(place,)) for place in range(40)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    for signal in signals:
        turns.set(signal)
        turns.set(signal)
    for thread in threads:
        thread.join(10)
    assert arrived == [True] * 40
    assert most == 2
    with turns, turns:  # no turn was lost
        pass


def test_nothing_is_begun_for_who_does_not_wait() -> None:
    WorkerRequest().check()
    with pytest.raises(GivenUpError):
        WorkerRequest(gone=True).check()
    with pytest.raises(DeadlineError):
        WorkerRequest(until=time.monotonic() - 1).check()


def test_a_fault_is_its_own_request_s_alone(engine: Engine) -> None:
    batcher = Batcher(torch.device("cpu"), 40)
    engine.may.clear()
    first = send(batcher, rows(1))
    assert engine.begun.acquire(timeout=60)
    good, bad = send(batcher, rows(4, first=7)), send(batcher, rows(4, first=BAD))
    engine.may.set()
    list(first.parts())
    assert good.stacked().tolist() == [28.0]
    with pytest.raises(PredictError, match="a bad row"):
        list(bad.parts())
    assert send(batcher, rows(2, first=3)).stacked().tolist() == [6.0]


def test_priorities_order_the_requests_of_a_key(engine: Engine) -> None:
    batcher = Batcher(torch.device("cpu"), 10)
    engine.may.clear()
    running = send(batcher, rows(10))
    assert engine.begun.acquire(timeout=60)
    low = send(batcher, rows(10, first=300), WorkerRequest(priority=-1))
    normal = [send(batcher, rows(10, first=400 + i)) for i in range(3)]
    high = [send(batcher, rows(10, first=500 + i), WorkerRequest(priority=1)) for i in range(2)]
    other = send(batcher, rows(10, first=600), WorkerRequest("other", priority=-1))
    engine.may.set()
    for pending in (running, low, *normal, *high, other):
        list(pending.parts())
    order = [batch[0] for batch in engine.batches]
    # Another key has its turn whatever its priority.
    assert order.index(600) <= 2
    order.remove(600)
    assert order == [1, 500, 501, 400, 401, 402, 300]


def test_low_priority_does_not_wait_for_ever(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "PRIORITY_SHIFT", 3)
    batcher = Batcher(torch.device("cpu"), 10)
    engine.may.clear()
    running = send(batcher, rows(10))
    assert engine.begun.acquire(timeout=60)
    all_of_them = [send(batcher, rows(10, first=300), WorkerRequest(priority=-1))]
    all_of_them += [send(batcher, rows(10, first=400 + i)) for i in range(8)]
    engine.may.set()
    for pending in (running, *all_of_them):
        list(pending.parts())
    assert [batch[0] for batch in engine.batches] == [1, 400, 401, 402, 300, 403, 404, 405, 406, 407]


def test_what_comes_alone_is_run_by_who_brings_it(engine: Engine) -> None:
    batcher = Batcher(torch.device("cpu"), 40, direct=True)
    here = threading.get_ident()
    # Twice: the first has been finished, and nothing is left of it.
    for first in (3, 5):
        assert send(batcher, rows(2, first=first)).stacked().tolist() == [2.0 * first]
        assert engine.threads[-1] == here
    with pytest.raises(PredictError, match="a bad row"):
        list(send(batcher, rows(4, first=BAD)).parts())
    assert [tokens for _, tokens, _ in batcher.drained()] == [2, 2]
    # More than runs at once, and what comes while another runs, are batches as ever.
    list(send(batcher, rows(41)).parts())
    assert engine.threads[-1] != here
    # The answer is there a moment before its thread waits again.
    while batcher._starting or batcher._waiting:
        time.sleep(0.001)
    engine.may.clear()
    other = threading.Thread(target=lambda: list(send(batcher, rows(8, first=50)).parts()))
    other.start()
    while len(engine.threads) < 5:
        time.sleep(0.001)
    behind = send(batcher, rows(8, first=70))
    engine.may.set()
    assert behind.stacked().tolist() == [560.0]
    other.join()
    assert engine.threads[-1] not in (here, other.ident)
    assert engine.threads[-2] == other.ident


@pytest.mark.parametrize(("links", "direct"), [(1, 4), (3, 6)])
def test_two_threads_of_each_link_may_run_what_they_bring(engine: Engine, links: int, direct: int) -> None:
    batcher = Batcher(torch.device("cpu"), 40, direct=True, links=links)
    own = []

    def bring() -> int:
        while batcher._starting or batcher._waiting:
            time.sleep(0.001)
        list(send(batcher, rows(2, first=3)).parts())
        own.append(engine.threads[-1] == threading.get_ident())
        return threading.get_ident()

    pools = [ThreadPoolExecutor(1) for _ in range(7)]  # all stay, so that none has the number of another
    assert len({pool.submit(bring).result() for pool in pools}) == 7
    for pool in pools:
        pool.shutdown()
    assert own == [True] * direct + [False] * (7 - direct)


def test_threads_take_turns_at_reading() -> None:
    requests: queue.Queue[Any] = queue.Queue()
    reading, most, answered = 0, 0, []
    gate, inside = threading.Event(), threading.Semaphore(0)

    def read() -> Any:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        found = requests.get()
        reading -= 1
        return found

    def answer(request: int, read_on: Any) -> None:
        inside.release()
        if not direct:
            read_on()
            read_on()
        if request >= 100:
            gate.wait()
        answered.append((request, threading.get_ident()))

    ran = threading.Thread(target=run_threads, args=(read, answer, 3))
    ran.start()
    # Where nobody is to read on meanwhile, one thread does it all.
    direct = True
    for number in range(-5, 0):
        requests.put(number)
        inside.acquire()
        while len(answered) <= number + 5:
            time.sleep(0.0005)
    assert len({thread for _, thread in answered}) == 1
    answered.clear()
    direct = False
    # One after another, two threads do it all.
    for number in range(20):
        requests.put(number)
        inside.acquire()
        while len(answered) <= number:
            time.sleep(0.0005)
    assert [number for number, _ in answered] == list(range(20))
    assert len({thread for _, thread in answered}) <= 2
    # As many at a time as there may be threads; what is beyond waits for the first that is done.
    for number in (100, 101, 102, 103):
        requests.put(number)
    for _ in range(3):
        inside.acquire()
    assert len(answered) == 20
    gate.set()
    inside.acquire()
    requests.put(None)
    ran.join(10)
    assert not ran.is_alive()
    while len(answered) < 24:
        time.sleep(0.0005)
    assert most == 1
    # None of them waits for requests that cannot come any more.
    own = {thread for _, thread in answered}
    while own & {thread.ident for thread in threading.enumerate()}:
        time.sleep(0.0005)


def test_a_fault_while_answering_lets_another_thread_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: queue.Queue[Any] = queue.Queue()
    monkeypatch.setattr(threading, "excepthook", ended.put)
    requests: queue.Queue[Any] = queue.Queue()
    answered = []
    seen = threading.Event()

    def answer(request: int, read_on: Any) -> None:
        if request == 0:
            raise RuntimeError("no answer")
        answered.append(request)
        seen.set()

    ran = threading.Thread(target=run_threads, args=(requests.get, answer, 3))
    ran.start()
    requests.put(0)
    requests.put(1)
    assert seen.wait(60)
    requests.put(None)
    ran.join(60)
    assert answered == [1]
    assert str(ended.get(timeout=60).exc_value) == "no answer"  # its thread may still be ending
    assert ended.empty()
    assert not ran.is_alive()


def test_a_request_that_is_given_up_before_its_rows_wait_waits_for_nothing() -> None:
    request = WorkerRequest(until=time.monotonic() + 0.05)
    request.give_up()
    with pytest.raises(GivenUpError):
        AwaitedResults(1, request).parts()
