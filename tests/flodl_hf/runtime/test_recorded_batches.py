"""Large batches come in few shapes and are recorded; what a replay gives is what the pass gives."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flodl_hf.inference import cuda_graphs
from flodl_hf.inference.batch import plan_batches
from flodl_hf.inference.cuda_graphs import SMALL, WAIT, Recorder
from flodl_hf.nn.buckets import Buffer, bucket_of

HOST = torch.device("cpu")


class Played:
    """What stands for a recorded pass on a device that records none: it overwrites its result like one."""

    def __init__(self, step: Callable[[Tensor], Tensor], input: Tensor) -> None:
        self.step, self.input, self.output = step, input, step(input).clone()
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self.output.copy_(self.step(self.input))


class Tape(Recorder):
    """A recorder of a device without recordings."""

    def __init__(self, fault: Exception | None = None) -> None:
        super().__init__()
        self.made: list[Played] = []
        self.fault = fault
        self.stream: object = "main"

    def records_on(self, device: torch.device) -> bool:
        return True

    def stream_of(self, device: torch.device) -> Any:
        return self.stream

    def capture(self, step: Callable[[Tensor], Tensor], input: Tensor) -> Played:
        if self.fault is not None:
            raise self.fault
        self.made.append(Played(step, input))
        return self.made[-1]


def double(packed: Tensor) -> Tensor:
    return packed * 2.0


def ask(
    tape: Tape, key: object, value: float, size: int = 4, step: Callable[[Tensor], Tensor] = double, wait: int = WAIT
) -> Any:
    """Return a replay's result; None where the pass ran by itself, of which the recorder is then told."""
    packed = torch.full((size,), value)
    found = tape.replayed(key, packed, HOST, lambda out: out.clone().tolist())
    if found is None:
        tape.saw(key, packed, step(packed), step, wait=wait)
    return found


def test_a_shape_is_recorded_behind_its_second_coming_and_then_replayed_on_each_input() -> None:
    tape = Tape()
    found = [ask(tape, "a", value) for value in (1.0, 2.0, 3.0, 4.0)]
    assert found == [None] * WAIT + [[6.0] * 4, [8.0] * 4]
    assert len(tape) == 1
    assert tape.made[0].replays == 2


def test_large_inputs_are_recorded_behind_their_first_coming() -> None:
    tape = Tape()
    assert [ask(tape, "a", 1.0, 400_000, wait=1) is None for _ in range(3)] == [True, False, False]


def test_another_stream_does_without_because_recordings_share_memory() -> None:
    tape = Tape()
    for _ in range(3):
        ask(tape, "a", 1.0)
    tape.stream = "another"
    assert ask(tape, "a", 1.0) is None
    tape.stream = "main"
    assert ask(tape, "a", 1.0) == [2.0] * 4


def test_what_is_kept_is_bounded_and_what_had_to_go_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "KEPT", 2)
    tape = Tape()
    for _ in range(40):
        for key in "abc":
            ask(tape, key, 1.0)
            assert len(tape) <= 2
    assert len(tape.made) < 15  # recording costs as much as many passes; without the wait there were 38
    monkeypatch.setattr(cuda_graphs, "KEPT_BYTES", 100)
    tape = Tape()
    for key in range(6):
        for _ in range(3):
            ask(tape, key, 1.0, size=10)
    assert len(tape) == 2  # 40 bytes each
    monkeypatch.setattr(cuda_graphs, "MOST_BYTES", 30)
    tape = Tape()
    assert [ask(tape, "wide", 1.0, size=10) for _ in range(5)] == [None] * 5
    assert not tape.made


@pytest.mark.parametrize("said", ["operation not permitted when stream is capturing", ""])
def test_a_pass_that_cannot_be_recorded_runs_as_it_did_and_that_is_said_once(said: str) -> None:
    tape = Tape(RuntimeError(said))
    with pytest.warns(UserWarning, match="not recorded") as warned:
        assert [ask(tape, "a", 1.0) for _ in range(6)] == [None] * 6
    assert len(warned) == 1
    assert tape.refused == f"RuntimeError: {said}"


def test_memory_that_recordings_lack_is_given_back_and_the_pass_runs_as_it_did() -> None:
    tape = Tape()
    for _ in range(3):
        ask(tape, "a", 1.0)
    tape.fault = torch.OutOfMemoryError("out of memory (made in a test)")
    assert [ask(tape, "b", 1.0) for _ in range(4)] == [None] * 4
    assert len(tape) == 0
    assert tape.refused is None


def mixed_lengths(count: int) -> np.ndarray:
    """Return log-normal lengths like those of the speed measurements."""
    draw = random.Random(0)
    return np.array([min(390, 2 + round(1.3 * min(300, max(1, draw.lognormvariate(3.09, 1.0))))) for _ in range(count)])


def test_large_batches_come_in_few_shapes_with_little_filling() -> None:
    lengths, full = mixed_lengths(20_000), 32_768
    buckets, tokens, all_tokens, full_tokens, full_real = set(), 0, 0, 0, 0
    start, window = 0, 512
    while start < len(lengths):
        sizes = lengths[start : start + window]
        for rows in plan_batches(sizes, full):
            bucket = bucket_of(sizes[rows], most=512, full=full)
            real = int(sizes[rows].sum())
            if real > SMALL:
                buckets.add(bucket)
            assert real <= bucket.tokens <= full
            tokens, all_tokens = tokens + real, all_tokens + bucket.tokens
            if real > 0.9 * full:
                full_real, full_tokens = full_real + real, full_tokens + bucket.tokens
        start, window = start + window, min(2 * window, 4096)
    assert len(buckets) <= 15
    assert all_tokens < 1.03 * tokens
    assert full_tokens < 1.005 * full_real


def test_small_batches_of_a_server_have_few_shapes() -> None:
    draw = np.random.default_rng(0)
    shapes, finer = set(), set()
    for _ in range(500):
        sizes = draw.integers(3, 40, draw.integers(1, 33))
        bucket = bucket_of(sizes, steps=1, most=512)
        assert bucket.tokens >= sizes.sum() > bucket.tokens // 2 or bucket.tokens == 32
        assert bucket.longest >= sizes.max()
        Buffer(bucket).write(np.zeros(sizes.sum(), np.int64), None, sizes)
        shapes.add(bucket)
        finer.add(bucket_of(sizes, most=512))
    assert len(shapes) <= 16 < len(finer) // 4


@pytest.mark.parametrize("budget", [17_000, 32_768, 50_000])
def test_a_bucket_of_large_batches_holds_them(budget: int) -> None:
    draw = np.random.default_rng(budget)
    for _ in range(10):
        lengths = -np.sort(-draw.integers(1, 500, 400))
        for rows in plan_batches(lengths, budget):
            sizes = lengths[rows]
            bucket = bucket_of(sizes, most=512, full=budget)
            assert bucket.tokens <= budget
            known = Buffer(bucket).write(np.zeros(int(sizes.sum()), np.int32), None, sizes)
            assert sum(known) == bucket.tokens


@pytest.mark.parametrize("types", [True, False])
def test_one_text_is_laid_out_as_several_are(types: bool) -> None:
    for size in itertools.chain(range(1, 70), (127, 128, 129, 300)):
        ids, kinds = np.arange(1, size + 1), np.ones(size, np.int64) if size % 2 else None
        bucket = bucket_of([size])
        one, several = Buffer(bucket, types=types), Buffer(bucket, types=types)
        known = one.write(ids, kinds, np.array([size]))
        # Two texts that lie where one and its filling do.
        rest = bucket.tokens - size
        sizes = np.array([size, rest] if rest else [size])
        assert sum(known) == bucket.tokens
        if 0 < rest <= bucket.longest:
            filled = np.concatenate([ids, np.zeros(rest, np.int64)])
            both = None if kinds is None else np.concatenate([kinds, np.zeros(rest, np.int64)])
            several.write(filled, both, sizes)
            assert torch.equal(one.packed, several.packed)
