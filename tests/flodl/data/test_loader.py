"""The loader: modes agree, positions come back to the bit, the worker stops and speaks up."""

import functools
import gc
import json
import operator
import pickle
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flodl.data import (
    Batch,
    CollateTokens,
    DataLoader,
    FixedBatches,
    RandomSampler,
    SequentialSampler,
    TensorRows,
    TokenBudgetBatches,
)
from flodl.data.batch import lay_out
from flodl.data.collate import collate_rows
from flodl.data.stream import Placement
from flodl.errors import DataError

ROWS = 23
MODES = [{}, {"mode": "resident"}, {"mode": "streaming"}, {"mode": "streaming", "prefetch": 0}]


def tensors():
    return {"x": torch.arange(ROWS * 2).reshape(ROWS, 2).float(), "y": torch.arange(ROWS)}


def token_rows():
    return [{"input_ids": list(range(1, 2 + i % 7)), "labels": [i] * (1 + i % 7), "id": i} for i in range(ROWS)]


def ids(batches, name="y"):
    return [b[name].tolist() for b in batches]


def move(loader, epoch, batch):
    loader.load_state_dict({**loader.state_dict(), "epoch": epoch, "batch": batch})


def workers():
    return [t for t in threading.enumerate() if t.name.startswith("flodl-data")]


def noisy(batch, where):
    return batch.with_parts(noise=torch.from_numpy(where.rng("noise").uniforms(batch.num_rows)))


# ------------------------------------------------------------------------------------------------ modes


@pytest.mark.parametrize("shuffle", [True, False])
def test_all_modes_give_the_same_batches(shuffle):
    runs = []
    for mode in MODES:
        loader = DataLoader(tensors(), 5, shuffle=shuffle, transform=noisy, **mode)
        runs.append([[(n, p.tolist()) for n, p in b.items()] for e in (0, 1) for b in loader.epoch(e)])
    assert all(run == runs[0] for run in runs)
    assert len(runs[0]) == 10
    assert sorted(i for b in runs[0][:5] for i in dict(b)["y"]) == list(range(ROWS))


def test_tensors_are_resident_and_rows_stream():
    assert DataLoader(tensors(), 5).is_resident
    assert not DataLoader(token_rows(), 5, collate=CollateTokens()).is_resident
    assert not DataLoader(tensors(), 5, mode="streaming").is_resident
    forced = DataLoader([{"y": i} for i in range(ROWS)], 5, mode="resident")
    assert forced.is_resident
    assert sorted(functools.reduce(operator.iadd, ids(forced), [])) == list(range(ROWS))


def test_rows_that_cannot_be_resident_are_refused_with_the_way_out():
    for data, collate in [(token_rows(), CollateTokens()), ([{"text": "a"}, {"text": "b"}], None)]:
        with pytest.raises(DataError, match="streaming"):
            iter(DataLoader(data, 2, mode="resident", collate=collate))


def test_running_out_of_memory_falls_back_to_streaming_with_order_and_position(monkeypatch):
    def full(self, device):
        raise torch.OutOfMemoryError("out of memory: 2 GiB asked")

    expected = ids(DataLoader(tensors(), batches=FixedBatches(RandomSampler(ROWS, 9), 4)).epoch(3))
    monkeypatch.setattr(TensorRows, "on", full)
    loader = DataLoader(tensors(), batches=FixedBatches(RandomSampler(ROWS, 9), 4))
    move(loader, 3, 2)
    with pytest.warns(UserWarning, match="2 GiB asked.*streaming"):
        batches = loader.epoch(3)
    assert not loader.is_resident
    assert ids(batches) == expected[2:]


def test_nothing_is_dropped_unless_asked():
    assert [b.num_rows for b in DataLoader(tensors(), 10)] == [10, 10, 3]
    assert [b.num_rows for b in DataLoader(tensors(), 10, drop_last=True)] == [10, 10]


# --------------------------------------------------------------------------------------------- position


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_resume_at_any_position_equals_the_uninterrupted_order(data):
    mode = data.draw(st.sampled_from(MODES))
    size = data.draw(st.integers(1, 8))
    epoch = data.draw(st.integers(0, 2))

    def loader():
        return DataLoader(tensors(), size, transform=noisy, **mode)

    def record(batches):
        return [[(n, p.tolist()) for n, p in b.items()] for b in batches]

    whole = record(loader().epoch(epoch))
    first = loader()
    running = first.epoch(epoch)
    taken = data.draw(st.integers(0, len(whole)))
    head = record(next(running) for _ in range(taken))
    state = json.loads(json.dumps(first.state_dict()))
    running.close()
    second = loader()
    second.load_state_dict(state)
    rest = second.epoch(epoch) if data.draw(st.booleans()) else iter(second)
    assert len(rest) == len(whole) - taken
    assert head + record(rest) == whole
    # the epoch after comes whole
    assert second.state_dict()["epoch"] == epoch + 1
    assert record(second) == record(loader().epoch(epoch + 1))


def test_plain_iteration_moves_from_epoch_to_epoch_and_a_break_starts_over():
    loader = DataLoader(tensors(), 5)
    first = ids(loader)
    assert loader.state_dict()["epoch"] == 1
    assert ids(loader) != first
    peek = next(iter(loader))["y"].tolist()
    assert loader.state_dict()["batch"] == 1
    assert next(iter(loader))["y"].tolist() == peek


def test_batches_made_ahead_do_not_count_as_taken():
    made = []
    loader = DataLoader(
        tensors(), 5, mode="streaming", prefetch=4, transform=lambda batch, where: made.append(where) or batch
    )
    running = iter(loader)
    next(running)
    deadline = time.monotonic() + 600
    while len(made) < len(loader) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loader.state_dict()["batch"] == 1
    running.close()


def test_a_forgotten_iterator_does_not_move_the_position():
    loader = DataLoader(tensors(), 5)
    old, new = loader.epoch(0), loader.epoch(2)
    next(new)
    next(old)
    next(old)
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (2, 1)


def test_any_rows_can_be_fetched_without_moving_the_position():
    loader = DataLoader(tensors(), 5, transform=noisy)
    expected = next(iter(loader))
    got = loader.fetch(expected.indices, 0, 0)
    assert [p.tolist() for p in got] == [p.tolist() for p in expected]
    assert loader.fetch(np.empty(0, dtype=np.int64), 0, 0)["x"].shape == (0, 2)
    assert loader.state_dict()["batch"] == 1


def test_a_saved_position_is_for_its_epoch_alone():
    loader = DataLoader(tensors(), 5)
    move(loader, 2, 3)
    assert len(loader.epoch(1)) == 5
    move(loader, 2, 3)
    assert len(loader.epoch(2)) == 2


def test_another_order_is_refused_difference_by_difference():
    state = DataLoader(tensors(), 5, seed=1).state_dict()
    with pytest.raises(DataError) as caught:
        DataLoader(tensors(), 6, seed=2, shuffle=False).load_state_dict(state)
    text = "\n".join(caught.value.problems)
    assert all(word in text for word in ("batch_size", "seed", "sampler"))
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems
    other = DataLoader(tensors(), 6, seed=1)
    other.load_state_dict(state, allow=["batch_size"])
    with pytest.raises(DataError, match="version"):
        other.load_state_dict({**state, "version": 9})


def test_token_budget_batches_resume_too():
    rows = token_rows()
    lengths = np.array([len(r["input_ids"]) for r in rows])
    source = TokenBudgetBatches(RandomSampler(ROWS), lengths, 16, "packed", window=8)

    def loader():
        return DataLoader(rows, batches=source, collate=CollateTokens("packed"))

    whole = ids(loader().epoch(1), "input_ids")
    assert max(map(len, whole)) <= 16
    second = loader()
    move(second, 1, 3)
    assert ids(second.epoch(1), "input_ids") == whole[3:]


def test_an_empty_share_has_the_parts_of_any_batch_without_rows():
    loader = DataLoader(token_rows(), 2, collate=CollateTokens("packed"))
    last = loader.fetch(np.empty(0, dtype=np.int64), 0, 0)
    assert last.num_rows == 0
    assert last["input_ids"].shape == (0,)
    assert last["input_ids"].dtype == torch.int64
    assert last["offsets"].tolist() == [0]
    assert last["max_length"] == 0


# ------------------------------------------------------------------------------------------- the worker


class Failing:
    def __init__(self, at):
        self.at = at

    def __len__(self):
        return 20

    def get(self, index):
        if index == self.at:
            raise ValueError("row 13 is rotten")
        return {"y": index}


@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_error_in_the_worker_reaches_the_consumer_in_its_turn(prefetch):
    loader = DataLoader(Failing(13), 4, shuffle=False, prefetch=prefetch)
    running = iter(loader)
    assert [next(running).num_rows for _ in range(3)] == [4, 4, 4]
    with pytest.raises(ValueError, match="rotten") as caught:
        next(running)
    assert "batch 3 of epoch 0" in caught.value.__notes__[0]
    assert loader.state_dict()["batch"] == 3
    assert list(running) == []
    assert not workers()


def test_dropping_an_iterator_early_stops_its_worker():
    class Endless:
        fetched = 0

        def __len__(self):
            return 10**6

        def get(self, index):
            Endless.fetched += 1
            return {"y": index}

    running = iter(DataLoader(Endless(), 2, prefetch=2))
    next(running)
    assert workers()
    del running
    gc.collect()
    deadline = time.monotonic() + 600
    while workers() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not workers()
    assert Endless.fetched <= 2 * 5


def test_close_and_with_stop_the_worker_at_once():
    loader = DataLoader(tensors(), 1, mode="streaming", prefetch=2)
    with iter(loader) as running:
        next(running)
    assert not workers()
    assert list(running) == []
    assert loader.state_dict()["batch"] == 1


def test_the_end_of_a_program_does_not_wait_for_a_blocked_data_set():
    program = """
import threading
import torch
import flodl.data.stream
from flodl.data import DataLoader

flodl.data.stream.CLOSE_S = 0.1
is_blocked = threading.Event()

def blocks(batch, where):
    if where.number == 1:
        is_blocked.set()
        threading.Event().wait()
    return batch

loader = DataLoader(torch.zeros(8, 2), 1, mode="streaming", prefetch=4, transform=blocks)
running = iter(loader)
next(running)
is_blocked.wait()
raise SystemExit(7)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=600).returncode == 7


def test_no_more_batches_exist_ahead_than_asked():
    made = []

    def slow(batch, where):
        made.append(where.number)
        return batch

    running = iter(DataLoader(tensors(), 1, mode="streaming", prefetch=3, transform=slow))
    deadline = time.monotonic() + 600
    while len(made) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.05)
    assert made == [0, 1, 2]
    running.close()


# ---------------------------------------------------------------------------------------------- batches


def test_parts_by_name_and_position_and_an_error_that_lists_names():
    batch = next(iter(DataLoader(dict(zip(("pixels", "digit"), tensors().values(), strict=True)), 5)))
    assert batch.names == ("pixels", "digit")
    assert batch[1] is batch["digit"]
    assert batch[-1] is batch["digit"]
    x, y = batch
    assert (x.shape, y.shape, len(batch), batch.num_rows) == ((5, 2), (5,), 2, 5)
    assert "digit" in batch
    assert "nothing" not in batch
    assert dict(**batch).keys() == {"pixels", "digit"}
    assert batch.indices.tolist() == y.tolist()
    with pytest.raises(DataError) as caught:
        batch["pixel"]
    assert caught.value.names == ("pixels", "digit")
    assert "did you mean 'pixels'" in str(caught.value)
    with pytest.raises(IndexError):
        batch[2]


def test_parts_of_plain_sequences_are_numbered():
    assert next(iter(DataLoader((torch.ones(3), torch.ones(3)), 2))).names == ("0", "1")


@pytest.mark.parametrize(
    "data",
    [
        tensors(),
        tuple(tensors().values()),
        torch.utils.data.TensorDataset(*tensors().values()),
        [{"x": a, "y": b} for a, b in zip(*tensors().values(), strict=True)],
        list(zip(*(t.numpy() for t in tensors().values()), strict=True)),
        TensorRows(tensors()),
    ],
    ids=lambda d: type(d).__name__,
)
def test_every_form_of_data_gives_the_same_batches(data):
    got = [[p.tolist() for p in b] for b in DataLoader(data, 5)]
    assert got == [[p.tolist() for p in b] for b in DataLoader(tensors(), 5)]


def test_objects_that_fetch_batches_or_many_rows_are_asked_once_a_batch():
    class Whole:
        def __len__(self):
            return 6

        def get_batch(self, indices):
            return [torch.tensor(indices)]

    class Many:
        def __len__(self):
            return 6

        def __getitem__(self, index):
            raise AssertionError("asked one by one")

        def __getitems__(self, indices):
            return [{"y": i} for i in indices]

    assert sorted(functools.reduce(operator.iadd, ids(DataLoader(Whole(), 4), "0"), [])) == list(range(6))
    assert sorted(functools.reduce(operator.iadd, ids(DataLoader(Many(), 4)), [])) == list(range(6))


@pytest.mark.parametrize(
    ("data", "kw"),
    [
        ([], {"batch_size": 2}),
        ([1], {"batch_size": 0}),
        ([1], {"batch_size": None}),
        ([1], {"batch_size": 2, "mode": "turbo"}),
        ([1], {"batch_size": 2, "batches": FixedBatches(SequentialSampler(1), 1)}),
        (iter([1]), {"batch_size": 2}),
        ({"a": [1, 2]}, {"batch_size": 2}),
        (TensorRows([torch.ones(2)]), {"batch_size": 2, "collate": collate_rows}),
        ({"a": torch.ones(2), "b": torch.ones(3)}, {"batch_size": 2}),
        ({"a": torch.tensor(1.0)}, {"batch_size": 2}),
    ],
)
def test_data_that_cannot_be_loaded_is_refused(data, kw):
    with pytest.raises(DataError):
        DataLoader(data, **kw)


@pytest.mark.parametrize(
    ("args", "found"),
    [
        ((torch.ones(3, 2), torch.ones(3)), "Tensor, Tensor"),
        ((torch.ones(3, 2),), "Tensor"),
        (((torch.ones(3),), torch.ones(3)), "tuple, Tensor"),
    ],
)
def test_tensor_rows_refuse_a_second_tensor(args, found):
    with pytest.raises(DataError) as caught:
        TensorRows(*args)
    assert caught.value.found == found


def test_rows_are_sampled_in_the_order_of_the_sampler():
    assert ids(DataLoader(tensors(), 3, sampler=SequentialSampler(4))) == [[0, 1, 2], [3]]


# ---------------------------------------------------------------------------------------------- collate


def test_padded_rows():
    out = CollateTokens(pad={"input_ids": 9}, multiple_of=4)(token_rows()[:3])
    assert out["input_ids"].tolist() == [[1, 9, 9, 9], [1, 2, 9, 9], [1, 2, 3, 9]]
    assert out["labels"].tolist() == [[0, -100, -100, -100], [1, 1, -100, -100], [2, 2, 2, -100]]
    assert out["attention_mask"].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
    assert (out["lengths"].tolist(), out["id"].tolist()) == ([1, 2, 3], [0, 1, 2])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=6))
def test_packed_rows_are_the_padded_ones_end_to_end(rows):
    given_rows = [{"input_ids": r, "labels": i} for i, r in enumerate(rows)]
    packed, padded = CollateTokens("packed", ragged=())(given_rows), CollateTokens(ragged=())(given_rows)
    edges = packed["offsets"].tolist()
    assert packed["offsets"].dtype == torch.int32
    for i, row in enumerate(rows):
        part = slice(edges[i], edges[i + 1])
        assert packed["input_ids"][part].tolist() == row
        assert packed["position_ids"][part].tolist() == list(range(len(row)))
        assert padded["input_ids"][i][padded["attention_mask"][i].bool()].tolist() == row
    assert packed["max_length"] == max(map(len, rows))
    assert packed["labels"].tolist() == padded["labels"].tolist() == list(range(len(rows)))


def test_rows_that_do_not_fit_together_are_all_named():
    with pytest.raises(DataError) as caught:
        CollateTokens(ragged=("labels",))([{"input_ids": [1], "labels": [1, 2]}, {"input_ids": [1], "labels": []}])
    assert len(caught.value.problems) == 2
    with pytest.raises(DataError, match="CollateTokens"):
        collate_rows([{"a": [1]}, {"a": [1, 2]}])
    with pytest.raises(DataError) as caught:
        collate_rows([{"a": 1}, {"b": 1}, {"a": 1, "b": 1}])
    assert len(caught.value.problems) == 2
    with pytest.raises(DataError, match="tokens="):
        CollateTokens()([{"text": [1]}])
    with pytest.raises(DataError, match="without parts"):
        collate_rows([{}])


def test_texts_stay_lists_and_numbers_become_tensors():
    out = collate_rows([{"t": "a", "f": 0.5, "b": True}, {"t": "b", "f": 1, "b": False}])
    assert out["t"] == ["a", "b"]
    assert out["f"].tolist() == [0.5, 1.0]
    assert out["b"].dtype == torch.bool


# ----------------------------------------------------------------------------------------------- memory


def test_room_and_depth_follow_the_free_memory(monkeypatch):
    gib, free = 1 << 30, {"bytes": 8 << 30}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free["bytes"], 10 * gib))
    loader = DataLoader(tensors(), 5, mode="streaming")
    loader.device = torch.device("cuda", 0)
    depths = []
    for loader._batch_bytes in (None, gib, 1):
        depths.append(loader.prefetch)
    assert depths == [4, 6, 64]
    loader._batch_bytes, free["bytes"] = gib, 0
    assert loader.prefetch == 1
    usages = [DataLoader(tensors(), 5, vram_max_usage=usage).vram_max_usage for usage in (0.1, 0.7, 2)]
    assert usages == [0.5, 0.7, 0.99]
    assert DataLoader(tensors(), 5, mode="streaming").prefetch == 2
    assert DataLoader(tensors(), 5, mode="streaming", prefetch=5).prefetch == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_on_a_device_equal_those_on_the_host():
    expected = [[p.tolist() for p in b] for b in DataLoader(tensors(), 5)]
    for mode in ("resident", "streaming"):
        for _ in range(20):
            loader = DataLoader(tensors(), 5, device="cuda", mode=mode)
            got = list(loader)
            assert all(p.is_cuda for b in got for p in b)
            assert [[p.tolist() for p in b] for b in got] == expected
            assert loader.is_resident == (mode == "resident")


def test_rows_and_batches_are_not_copied_without_need():
    rows = TensorRows(tensors())
    assert DataLoader(rows, 2).data is rows
    assert rows.on(torch.device("cpu")) is rows
    batch = Batch({"a": torch.ones(2), "t": ["x", "y"], "n": 3}, 2)
    assert batch.num_bytes() == 8
    assert batch.to("cpu")["t"] == ["x", "y"]
    assert batch.emptied()["t"] == []
    assert "2 rows" in repr(batch)


PARTS = {
    "ids": torch.arange(7),
    "offsets": torch.arange(3, dtype=torch.int32),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "one": torch.tensor(3.25),
    "flags": torch.tensor([[True], [False]]),
    "none": torch.zeros(0, 4),
}


def test_a_batch_in_one_piece_has_the_parts_it_had():
    batch = Batch({**PARTS, "names": ["a", "b"]}, 2)
    piece = lay_out(batch.items())
    assert piece is not None
    moved = batch.over(piece.at(piece.memory.clone()))
    assert moved.names == batch.names
    assert moved["names"] == ["a", "b"]
    assert moved.piece is not None
    for name, part in PARTS.items():
        assert torch.equal(moved[name], part), name
        assert moved[name].dtype == part.dtype
        assert moved[name].shape == part.shape
        assert moved[name].untyped_storage().data_ptr() == moved.piece.memory.data_ptr()
    assert moved.with_parts(ids=torch.zeros(1)).piece is None


@pytest.mark.parametrize("part", [torch.ones(2, 3).t(), torch.ones(2, requires_grad=True), torch.ones(2).to_sparse()])
def test_parts_that_do_not_lie_in_order_go_one_by_one(part):
    assert lay_out({**PARTS, "part": part}.items()) is None
    assert lay_out([("names", ["a"])]) is None


@pytest.mark.gpu
def test_a_batch_in_one_piece_arrives_whole():
    placement = Placement(torch.device("cuda", 0))
    found = placement.receive(*placement.send(Batch(dict(PARTS), 2)))
    assert found.piece is not None
    assert all(torch.equal(found[name].cpu(), part) for name, part in PARTS.items())
