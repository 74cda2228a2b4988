"""Several devices with a process for each: the answers of one, in order, and what goes wrong is told."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from flodl.errors import FlodlError
from flodl_hf.errors import PredictError
from flodl_hf.inference import workers
from flodl_hf.inference.engine import Engine
from flodl_hf.inference.worker import Worker, known_of
from flodl_hf.models.encoder_model import EncoderModel
from flodl_hf.workers import pool
from flodl_hf.workers.messages import Stream
from flodl_hf.workers.pool import pack_object, unpack_object

Make = Callable[..., EncoderModel]
LONG = "the cat sat on the mat and ran " * 12
TEXTS = ["the cat sat", LONG, "", "a dog", f"very good film {LONG}", "good", "ada lives in paris", "not bad"] * 3
# What runs by itself does not depend on how texts came together.
EXACT: dict[str, Any] = {"precision": "exact", "batch_invariant": True, "window": 3}
TWO: dict[str, Any] = {"devices": ["cpu", "cpu"], **EXACT}


class Threaded:
    """A worker in a thread of this process, which starts at once."""

    reason = ""
    pid = 0

    def __init__(self, device: torch.device, cores: int) -> None:
        self.name = str(device)
        self.socket, its = socket.socketpair()
        self.stream = Stream(its)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        Worker(self.stream).run()
        # As the end of a process does.
        self.stream.shut()
        self.stream.close()

    def kill(self) -> None:
        self.stream.shut()

    def end(self) -> str:
        self.thread.join(30)
        return "ended"


@pytest.fixture
def threaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(workers, "_started", Threaded)
    monkeypatch.setattr(workers, "worth_it", lambda devices: len(devices) > 1)
    monkeypatch.setattr(workers, "MIN_TEXTS", 1)
    yield
    for found in list(workers._OF.values()):
        found.close()


def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return where the sizes of the windows that workers are asked will be."""
    seen: list[int] = []
    plain = workers.Workers.ask
    monkeypatch.setattr(
        workers.Workers, "ask", lambda self, call, texts: (seen.append(len(texts)), plain(self, call, texts))[1]
    )
    return seen


def call_of(model: Any, texts: Any, **run: Any) -> Any:
    if model.head == "question_answering":
        pairs: Any = (("who lives in paris?", text) for text in texts)
        return model.answer_batch(list(pairs) if isinstance(texts, list) else pairs, **run)
    return model.embed(texts, windows=True, **run) if model.head == "base" else model.predict(texts, **run)


@pytest.mark.parametrize("head", ["base", "sequence_classification", "token_classification", "question_answering"])
def test_workers_give_the_answers_of_one_device(
    make: Make, threaded: None, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    model = make("bert", head)
    expected = call_of(model, TEXTS, **EXACT)
    seen = asked(monkeypatch)
    call_of(model, TEXTS, **TWO)  # starts them
    workers._OF[model].wait()
    seen.clear()
    found, streamed = call_of(model, TEXTS, **TWO), list(call_of(model, iter(TEXTS), **TWO))
    assert len(seen) >= len(TEXTS) * 2 // 3
    if head == "base":
        assert torch.equal(found, expected)
        assert torch.equal(torch.stack(streamed), expected)
    else:
        assert found == expected
        assert streamed == expected
    # One text does not wait for another process.
    seen.clear()
    assert type(call_of(model, TEXTS[:1], **EXACT)) is type(expected)
    assert not seen


def test_a_changed_model_is_sent_again_and_threads_answer_meanwhile(make: Make, threaded: None) -> None:
    model: Any = make("bert", "sequence_classification")
    model.predict(TEXTS, **TWO)
    first = workers._OF[model]
    first.wait()
    before = model.predict(TEXTS, **TWO)
    with torch.no_grad():
        model.graph.get_parameter("head.classifier.bias")[0] += 3
    after = model.predict(TEXTS, **TWO)
    assert workers._OF[model] is not first
    assert first.closed
    assert after == model.predict(TEXTS, **EXACT) != before
    workers._OF[model].wait()
    assert model.predict(TEXTS, **TWO) == after
    kept = workers._OF[model]
    del model, first
    kept.close()


def test_the_first_texts_are_answered_for_nothing_before_answers_are_waited_for(
    make: Make, threaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = make("bert", "sequence_classification")
    sent: list[list[str]] = []
    plain = pool.Worker.ask

    def ask(self: Any, message: Any, arrays: Any, **words: Any) -> Any:
        if message["kind"] == "texts":
            sent.append(unpack_object(arrays))
        return plain(self, message, arrays, **words)

    monkeypatch.setattr(pool.Worker, "ask", ask)
    monkeypatch.setattr(workers, "WINDOW_TEXTS", 5)
    # Neither faults of texts nor answers of theirs come to anyone but the call that they belong to.
    with pytest.raises(FlodlError, match="surrogate"):
        model.predict(["\ud800", *TEXTS], **TWO)
    found = workers._OF[model]
    found.wait()
    assert found.ready
    assert sent[:4] == [["\ud800", *TEXTS[:4]]] * 4
    assert model.predict(TEXTS, **TWO) == model.predict(TEXTS, **EXACT)
    assert workers._OF[model] is found


def test_a_fault_there_is_raised_here_and_the_next_call_goes_on(make: Make, threaded: None) -> None:
    model: Any = make("bert", "sequence_classification")
    model.predict(TEXTS, **TWO)
    workers._OF[model].wait()
    with pytest.raises(FlodlError, match="surrogate"):
        model.predict([*TEXTS, "\ud800"], **TWO)
    assert model.predict(TEXTS, **TWO) == model.predict(TEXTS, **EXACT)


def test_a_device_that_broke_is_left_and_a_fork_leaves_all(
    make: Make, threaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = make("bert", "sequence_classification")
    expected = model.predict(TEXTS, **TWO)
    first = workers._OF[model]
    first.wait()
    plain = Engine.start
    monkeypatch.setattr(Engine, "start", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("illegal access")))
    with pytest.raises(RuntimeError, match="illegal access") as told:
        model.predict(TEXTS, **TWO)
    assert "in the process for cpu" in "".join(told.value.__notes__)
    monkeypatch.setattr(Engine, "start", plain)
    assert model.predict(TEXTS, **TWO) == expected
    second = workers._OF[model]
    assert second is not first
    assert first.closed
    second.wait()
    mine = os.getpid()
    monkeypatch.setattr(workers.os, "getpid", lambda: mine + 1)
    assert not second.fits(model, second.devices)
    second.close()
    monkeypatch.undo()
    assert all(one.sound and not one.end for one in second._workers)
    second.close()
    assert all(one.end for one in second._workers)


def test_a_call_that_is_left_in_the_middle_disturbs_no_other(make: Make, threaded: None) -> None:
    model: Any = make("bert", "sequence_classification")
    expected = model.predict(TEXTS, **TWO)
    workers._OF[model].wait()
    for _ in range(3):
        assert next(iter(model.predict(iter(TEXTS[::-1]), **TWO))) == expected[-1]

    def interrupted() -> Iterator[str]:
        yield from TEXTS[:9]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(model.predict(interrupted(), **TWO))
    assert model.predict(TEXTS, **TWO) == expected


def test_few_texts_and_processors_start_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_started", lambda *_: pytest.fail("started a process"))
    model: Any = make("bert", "sequence_classification")
    monkeypatch.setattr(workers, "MIN_TEXTS", 1)
    model.predict(TEXTS, **TWO)
    monkeypatch.setattr(workers, "worth_it", lambda devices: True)
    monkeypatch.setattr(workers, "MIN_TEXTS", len(TEXTS) + 1)
    model.predict(TEXTS, **TWO)
    cuda = [torch.device("cuda", i) for i in (0, 1, 0)]
    monkeypatch.undo()
    assert workers.worth_it(cuda[:2])
    assert not workers.worth_it(cuda)
    assert not workers.worth_it(cuda[:1])
    assert not workers.worth_it([torch.device("cpu"), cuda[0]])


def test_what_cannot_be_sent_stays_here_with_one_warning(
    make: Make, threaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = make("bert", "sequence_classification")
    model.extra = lambda: None  # no pickle has this
    told: list[str] = []
    monkeypatch.setattr(workers.warnings, "warn", lambda message, **_: told.append(message))
    found = model.predict(TEXTS, **TWO)
    workers._OF[model].wait()
    assert [message for message in told if "continues in one process" in message] == told[-1:]
    assert found == model.predict(TEXTS, **TWO) == model.predict(TEXTS, **EXACT)


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(6.0).view(2, 3).t(), torch.zeros(0, 4), torch.tensor(True), torch.ones(3, dtype=torch.bfloat16)],
    ids=["strided", "empty", "scalar", "bfloat16"],
)
def test_objects_come_back_with_their_tensors(tensor: torch.Tensor) -> None:
    one, other = (Stream(end) for end in socket.socketpair())
    array = np.arange(5)
    one.write({"id": 1}, pack_object({"tensor": tensor, "again": tensor, "array": array, "none": np.zeros(0)}))
    one.write({"id": 2}, pack_object(["text", array], plain=True))
    (_, arrays), (_, more) = other.read() or ({}, []), other.read() or ({}, [])
    found = unpack_object(arrays)
    assert torch.equal(found["tensor"], tensor)
    assert found["tensor"].dtype == tensor.dtype
    assert found["again"] is found["tensor"]
    found["array"][0] = 7  # may be written to, as what was sent
    text, second = unpack_object(more)
    assert (text, second.tolist()) == ("text", array.tolist())
    one.shut()
    assert other.read() is None
    one.close()
    other.close()


def test_a_model_is_a_word_where_both_sides_have_it(make: Make) -> None:
    model: Any = make("bert", "base")
    arrays = pack_object((model.embed, model.tokenizer), known_of(model))
    assert sum(array.nbytes for array in arrays) < 1000
    other = make("bert", "base")
    method, tokenizer = unpack_object(arrays, known_of(other))
    assert method.__self__ is other
    assert tokenizer is other.tokenizer


PROGRAM = """
import os, signal, sys
sys.path[:0] = {path!r}
from flodl_hf import load
from flodl_hf.inference import workers
from flodl_hf.inference.engine import Engine
workers.worth_it, workers.MIN_TEXTS = (lambda devices: len(devices) > 1), 1
model = load({folder!r})
texts = ["the cat sat", "a dog", "good", "ada lives in paris"] * 4
run = dict(devices=["cpu", "cpu"], window=2, precision="exact", batch_invariant=True, untrained=True)
model.predict(texts, **run)
workers._OF[model].wait()
assert workers._OF[model].ready
assert model.predict(texts, **run) == model.predict(texts, **(run | dict(devices=None)))
pids = [one.process.pid for one in workers._OF[model]._workers]
for pid in pids:
    os.kill(pid, signal.SIGINT)  # Ctrl-C reaches all of a group, and means something to the caller alone
assert len(model.predict(texts, **run)) == 16
os.kill(pids[0], signal.SIGKILL)
workers._OF[model]._workers[0].join()
print(len(model.predict(texts, **run)), *pids, flush=True)
"""


def test_processes_start_answer_and_end_with_the_program(saved: Callable[..., Any]) -> None:
    folder = saved("bert", "sequence_classification")
    code = PROGRAM.format(path=sys.path, folder=str(folder))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    # No guard of the main module is needed, and nothing waits for the processes at the end.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, env=env)
    assert done.returncode == 0, done.stderr
    answers, *pids = map(int, done.stdout.split())
    assert answers == 16
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def cut(found: workers.Workers) -> None:
    """Cut the lines to all processes."""
    for one in found._workers:
        one._stream.shut()


def test_a_process_that_ends_is_told(make: Make, threaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = make("bert", "sequence_classification")
    expected = model.predict(TEXTS, **TWO)
    first = workers._OF[model]
    first.wait()
    plain = workers.Workers.ask

    def ask(self: workers.Workers, call: int, texts: list[Any]) -> Any:
        cut(self)
        return plain(self, call, texts)

    monkeypatch.setattr(workers.Workers, "ask", ask)
    with pytest.raises(PredictError, match="cpu ended"):
        model.predict(TEXTS, **TWO)
    monkeypatch.setattr(workers.Workers, "ask", plain)
    assert model.predict(TEXTS, **TWO) == expected
    second = workers._OF[model]
    assert second is not first
    second.wait()
    # One that ended between calls is told to nobody.
    cut(second)
    for one in second._workers:
        one.join()
    assert model.predict(TEXTS, **TWO) == expected


class _Stubborn(Exception):
    """Can be pickled, and not be made of the pickle again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_faults_that_cannot_be_sent_as_they_are_come_as_their_text(
    make: Make, threaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = make("bert", "sequence_classification")
    model.predict(TEXTS, **TWO)
    workers._OF[model].wait()
    plain = Engine.start
    for fault in (_Stubborn(1, 2), type("Local", (Exception,), {})("1 and 2")):
        monkeypatch.setattr(Engine, "start", lambda *_, fault=fault, **__: (_ for _ in ()).throw(fault))
        with pytest.raises(RuntimeError, match=r"(_Stubborn|Local): 1 and 2"):
            model.predict(TEXTS, **TWO)
        monkeypatch.setattr(Engine, "start", plain)
        assert len(model.predict(TEXTS, **TWO)) == len(TEXTS)
        workers._OF[model].wait()


def test_answers_that_cannot_be_read_end_the_wait_and_the_process_is_left(
    make: Make, threaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = make("bert", "sequence_classification")
    expected = model.predict(TEXTS, **TWO)
    first = workers._OF[model]
    first.wait()
    plain = workers.unpack_object

    def unreadable(arrays: Any) -> Any:
        raise AttributeError("no such class here")

    monkeypatch.setattr(workers, "unpack_object", unreadable)
    with pytest.raises(PredictError, match=r"sent an invalid message .AttributeError: no such class here"):
        model.predict(TEXTS, **TWO)
    monkeypatch.setattr(workers, "unpack_object", plain)
    # Nobody listens there any more.
    late = first._workers[0].ask({"kind": "texts", "call": 99})
    with pytest.raises(PredictError, match="cpu"):
        late.result(10)
    assert not first.fits(model, first.devices)
    assert model.predict(TEXTS, **TWO) == expected
    assert workers._OF[model] is not first


@pytest.mark.gpu
@pytest.mark.parametrize("head", ["base", "sequence_classification", "token_classification", "question_answering"])
def test_processes_answer_for_gpus(make: Make, monkeypatch: pytest.MonkeyPatch, head: str) -> None:
    monkeypatch.setattr(workers, "worth_it", lambda devices: len(devices) > 1)
    monkeypatch.setattr(workers, "MIN_TEXTS", 1)
    model = make("bert", head, hidden_size=64, num_attention_heads=2, intermediate_size=96).to("cuda", torch.bfloat16)
    devices = [f"cuda:{i % torch.cuda.device_count()}" for i in range(2)]
    run: dict[str, Any] = {"devices": devices, "window": 4, "batch_invariant": True}
    expected = call_of(model, TEXTS, **run)
    workers._OF[model].wait()
    assert workers._OF[model].ready
    seen = asked(monkeypatch)
    for _ in range(2):
        found = call_of(model, TEXTS, **run)
        assert torch.equal(found, expected) if head == "base" else found == expected
    assert seen
    workers._OF[model].close()
