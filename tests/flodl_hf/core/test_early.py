"""What is begun while torch is imported: only where it is wanted, and never more than torch would do itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flodl_hf.checkpoints import system
from flodl_hf.checkpoints.weights import prefetch as early


class Driver:
    """Stands in for NVIDIA's driver."""

    def __init__(self, fails_at: str = "") -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fails_at = fails_at

    def _call(self, name: str, value: Any) -> int:
        self.calls.append((name, value))
        return 100 if name == self.fails_at else 0

    def cuInit(self, flags: int) -> int:
        return self._call("cuInit", flags)

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal + 40
        return self._call("cuDeviceGet", ordinal)

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        return self._call("cuDevicePrimaryCtxRetain", device.value)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Return a driver, in a process that has yet to import torch."""
    found = Driver()
    monkeypatch.setattr(system.ctypes, "CDLL", lambda name: found)
    monkeypatch.setattr(early, "_uses_cuda", lambda: True)
    monkeypatch.setattr(early, "usable_cpus", lambda: 2)
    monkeypatch.setattr(early, "skip_gc_at_exit", lambda: None)
    monkeypatch.delitem(sys.modules, "torch")

    class Now(early.Thread):
        def start(self) -> None:
            self.run()

    monkeypatch.setattr(early, "Thread", Now)
    return found


@pytest.mark.parametrize(
    ("device", "ordinal"),
    [("cuda", 0), ("cuda:0", 0), ("cuda:3", 3), ("auto", 0), (None, None), ("cpu", None), ("mps", None),
     ("cuda:x", None), ("cuda:-1", None), (0, None), ("", None)],
)  # fmt: skip
def test_the_context_of_the_device_that_was_named_is_made(driver: Driver, device: Any, ordinal: int | None) -> None:
    with early.prefetching("nowhere", {"device": device}):
        pass
    made = [("cuInit", 0), ("cuDeviceGet", ordinal), ("cuDevicePrimaryCtxRetain", (ordinal or 0) + 40)]
    assert driver.calls == ([] if ordinal is None else made)


def test_a_launcher_says_which_device_is_best_here(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    with early.prefetching("nowhere", {"device": "auto"}):
        pass
    assert driver.calls[1] == ("cuDeviceGet", 2)


@pytest.mark.parametrize("name", ["cuInit", "cuDeviceGet"])
def test_a_driver_that_fails_is_left_alone(driver: Driver, name: str) -> None:
    driver.fails_at = name
    with early.prefetching("nowhere", {"device": "cuda"}):
        pass
    assert driver.calls[-1][0] == name


def test_no_context_is_made_that_torch_would_not_make(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "_uses_cuda", lambda: False)
    with early.prefetching("nowhere", {"device": "auto"}):
        pass
    monkeypatch.setattr(early, "_uses_cuda", lambda: True)
    monkeypatch.setattr(early, "usable_cpus", lambda: 1)
    with early.prefetching("nowhere", {"device": "cuda"}):
        pass
    monkeypatch.setattr(early, "usable_cpus", lambda: 2)
    monkeypatch.setitem(sys.modules, "torch", early)
    with early.prefetching("nowhere", {"device": "cuda"}):
        pass
    assert driver.calls == []

    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(system.ctypes, "CDLL", absent)
    with early.prefetching("nowhere", {"device": "cuda"}):
        pass


ENDING = """
import atexit, gc, sys
if {there}:
    sys.modules["torch"] = sys
from flodl_hf.checkpoints.weights.prefetch import prefetching
atexit.register(lambda: print(gc.get_freeze_count() > 0))
with prefetching("nowhere", {{}}):
    assert not gc.get_freeze_count()
"""


@pytest.mark.parametrize("there", [False, True])
def test_a_program_that_torch_comes_to_with_us_ends_without_seeking_garbage(there: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING.format(there=there)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(not there)]


def test_a_torch_without_cuda_is_known_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('imported')")
    assert not early._uses_cuda()
    (tmp_path / "torch" / "lib" / "libtorch_cuda.so").write_bytes(b"")
    assert early._uses_cuda()


@pytest.mark.parametrize("option", ["mapped", "subfolder", "verified"])
def test_options_that_want_nothing_read_ahead_are_heard(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    from contextlib import nullcontext

    seen: list[Any] = []
    monkeypatch.setattr(early, "prefetched", lambda folder: seen.append(folder) or nullcontext())
    with early.prefetching("a folder", {option: True}), early.prefetching("a folder", {}):
        pass
    assert seen == [None, "a folder"]


PROGRAM = """
import atexit, gc, json, sys
atexit.register(lambda: print(gc.get_freeze_count() > 100_000))
from flodl_hf.checkpoints.weights import prefetch as early
early.usable_cpus = lambda: 2
seen = []
from flodl_hf.checkpoints.weights import prefetch as ahead
begun = ahead._Ahead.__init__
ahead._Ahead.__init__ = lambda self, folder: (seen.append("torch" in sys.modules), begun(self, folder))[1]
sys.argv = ["flodl-hf", "predict", {folder!r}, "a text", "--device", "cpu", "--json"]
from flodl_hf.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps(seen))
"""


def test_the_command_line_begins_before_torch_is_there(saved: Callable[..., Any]) -> None:
    folder = str(saved("bert", "sequence_classification"))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(folder=folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *answers, seen, spared = done.stdout.splitlines()
    assert json.loads(answers[-1])["text"] == "a text"
    assert json.loads(seen) == [False]
    # Nothing that a prediction leaves behind keeps the program from ending at once.
    assert spared == "True"


FIRST = """
import json, sys
from flodl_hf import AutoModelForSequenceClassification
from flodl_hf.checkpoints.weights import prefetch as early
seen = []
plain = early.make_cuda_context
early.make_cuda_context = lambda place: (seen.append("torch" in sys.modules), plain(place))[1]
model = AutoModelForSequenceClassification.from_pretrained({folder!r}, device="cuda")
found = model.predict(["a film"], untrained=True)
import torch
print(json.dumps([seen, torch.cuda.is_initialized(), torch.cuda.device_count() > 0, len(found)]))
"""


@pytest.mark.gpu
def test_torch_finds_the_context_that_was_made(saved: Callable[..., Any]) -> None:
    folder = str(saved("bert", "sequence_classification"))
    done = subprocess.run(
        [sys.executable, "-c", FIRST.format(folder=folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[False], True, True, 1]
