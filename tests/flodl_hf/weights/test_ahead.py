"""Weights read while torch is imported: the same tensors, and never those of another file or of a damaged one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from weight_tables import same

from flodl.errors import CheckpointError
from flodl_hf.checkpoints.weights import manifest as opened
from flodl_hf.checkpoints.weights import prefetch as ahead
from flodl_hf.checkpoints.weights.checkpoint import Checkpoint
from flodl_hf.checkpoints.weights.prefetch import prefetched


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many tensors were read when they were asked for."""
    counts: list[int] = []
    plain = opened.fill

    def counting(descriptor: int, where: str, extents: Any, views: Any) -> None:
        counts.append(len(extents))
        plain(descriptor, where, extents, views)

    monkeypatch.setattr(opened, "fill", counting)
    return counts


def test_what_was_read_ahead_is_what_the_file_holds(
    single: Path, tensors: dict[str, Tensor], copied: list[int]
) -> None:
    with prefetched(str(single)):
        with Checkpoint.open(single) as source:
            found = source.read_all()
        empty = sum(not tensor.numel() for tensor in tensors.values())
        assert sum(copied) == empty
        # Each was taken once; who asks again reads.
        with Checkpoint.open(single) as source:
            again = source.read_all()
    assert sum(copied) == empty + len(tensors)
    assert all(same(found[name], tensors[name]) and same(again[name], tensors[name]) for name in tensors)
    (single / "model.safetensors").unlink()
    for name, tensor in found.items():
        tensor.zero_()  # one's own memory, that of no other
        assert same(again[name], tensors[name])


def test_a_file_that_changed_since_is_read_again(
    single: Path, tensors: dict[str, Tensor], copied: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = single / "model.safetensors"
    for change in ("written", "exchanged"):
        copied.clear()
        with prefetched(single):
            now = ahead._NOW.get()
            assert now is not None
            now._thread.join()
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            if change == "exchanged":
                beside = single / "new"
                beside.write_bytes(data)
                os.utime(beside, ns=(0, os.stat(path).st_mtime_ns))
                os.replace(beside, path)
            else:
                path.write_bytes(data)
            with Checkpoint.open(single) as source:
                found = source.read_all()
        assert sum(copied) == len(tensors)
        last = list(found)[-1]
        with Checkpoint.open(single) as source:
            assert same(found[last], source.read_all([last])[last])


@pytest.mark.parametrize("fault", ["header", "cut", "huge", "link", "absent", "pipe"])
def test_faults_are_told_by_who_opens_the_folder(single: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = single / "model.safetensors"
    data = path.read_bytes()
    if fault == "header":
        path.write_bytes(b"\xff" * 8 + data[8:])
    elif fault == "cut":
        path.write_bytes(data[:-5])
    elif fault == "huge":
        monkeypatch.setattr(ahead, "MOST_BYTES", 10)
    else:
        path.unlink()
    if fault == "link":
        (single.parent / "elsewhere").write_bytes(data)
        path.symlink_to(single.parent / "elsewhere")
    if fault == "pipe":
        os.mkfifo(path)
    with prefetched(single):
        if fault == "huge":
            with Checkpoint.open(single) as source:
                assert source.read_all()
            return
        with pytest.raises(CheckpointError), Checkpoint.open(single) as source:
            source.read_all()


@pytest.mark.parametrize("given", ["owner/name", "", 7, None, b"\xff", "a\0b"])
def test_what_is_no_folder_is_passed_over(given: Any) -> None:
    with prefetched(given):
        assert ahead._NOW.get() is None


def test_memory_that_nobody_took_is_let_go(single: Path) -> None:
    with prefetched(single):
        now = ahead._NOW.get()
        assert now is not None
        now._thread.join()
        assert now._memory
    assert not now._memory
    assert ahead._NOW.get() is None


PROGRAM = """
import sys, json
import flodl_hf
from flodl_hf import AutoModelForSequenceClassification, load
from flodl_hf.checkpoints.weights import prefetch as ahead
before = sorted({{"torch", "numpy"}} & set(sys.modules))
from flodl_hf.checkpoints.weights import prefetch as early
early.usable_cpus = lambda: 2
plain, taken = ahead._Ahead.of, []
ahead._Ahead.of = lambda self, descriptor: taken.append(len(plain(self, descriptor))) or plain(self, descriptor)
model = AutoModelForSequenceClassification.from_pretrained({folder!r})
again = load({folder!r})  # torch is there
import torch
same = all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
print(json.dumps([before, taken, same, len(list(model.parameters()))]))
"""


def test_a_new_process_reads_weights_while_it_imports_torch(tmp_path: Path) -> None:
    from flodl_hf.checkpoints.config.model_config import ModelConfig
    from flodl_hf.heads.auto import head_named

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = ModelConfig.for_model("bert", vocab_size=9, max_position_embeddings=8, type_vocab_size=2, **sizes)
    model = head_named("sequence_classification").model.from_config(config)
    model._mark_untrained(())
    model.save_pretrained(tmp_path / "model")
    code = PROGRAM.format(folder=str(tmp_path / "model"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, taken, equal, count = json.loads(done.stdout)
    assert before == []
    assert taken == [count]
    assert equal
