"""Ctrl-C at any line: nothing that calls share stays changed, and the next call is right."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from flodl.garbage_collection import gc_frozen, gc_paused
from flodl_hf.checkpoints.saving.publish import publish_folder
from tests.torture import interrupts
from tests.torture.ctrl_c import CtrlC
from tests.torture.runner import run_cases


def at_every_line(call: Callable[[], Any], after: Callable[[str], None], by: int = 1) -> int:
    """Interrupt a call at each of its lines in turn, or at every `by`-th; return how many there are."""
    number = 1 - by
    while True:
        number += by
        with CtrlC(number) as sent:
            try:  # noqa: SIM105 - the lines of suppress() would be interrupted too
                call()
            except KeyboardInterrupt:
                pass
        if not sent.where:
            return number - 1
        after(sent.where)


PAUSES = (gc_paused, lambda: gc_paused(settled=True), gc_frozen)


@pytest.mark.parametrize("pause", PAUSES, ids=["plain", "settled", "frozen"])
def test_collection_is_on_again_wherever_it_came(pause: Callable[[], AbstractContextManager[None]]) -> None:
    def call() -> None:
        with pause():
            pass

    def after(where: str) -> None:
        assert gc.isenabled(), where
        assert not gc.get_freeze_count(), where

    assert at_every_line(call, after) > 10


# Some of the lines are between the opening of a file or a folder by the standard library and its closing, which the
# interpreter does then; what comes inside of a `__del__` is reported and passed over.
@pytest.mark.filterwarnings("ignore:unclosed (file|scandir):ResourceWarning")
@pytest.mark.filterwarnings(r"ignore:[\s\S]*KeyboardInterrupt:pytest.PytestUnraisableExceptionWarning")
def test_a_folder_is_the_old_or_the_new_one_and_the_next_leaves_nothing_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def publish(text: str) -> None:
        publish_folder(target, lambda folder: (folder / "config.json").write_text(text), overwrite=True)

    def after(where: str) -> None:
        assert (target / "config.json").read_text() in ("old", "new"), where
        publish("old")
        assert [path.name for path in tmp_path.iterdir()] == ["model"], where

    publish("old")
    assert at_every_line(lambda: publish("new"), after, by=37) > 100
    shutil.rmtree(target)


@pytest.mark.parametrize("name", interrupts.ACTS)
def test_the_next_call_is_right(name: str) -> None:
    chosen = [case for case in interrupts.cases(0, 400) if case.kind == name][: 6 if name == "inside" else 2]
    for case, verdict in run_cases(interrupts, chosen):
        assert verdict.good, (case.line, verdict.text)


def test_a_count_without_a_line_interrupts_nothing() -> None:
    with CtrlC() as counted:
        sorted([3, 1, 2], key=lambda number: -number)
    assert counted.lines == 3
    assert not counted.where


def test_ctrl_c_while_torch_exchanges_its_modes_is_still_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch.overrides import _len_torch_function_stack, _pop_mode

    from flodl_hf import load
    from flodl_hf.models import building
    from tests.torture.checkpoints import checkpoint, write_files

    def struck(*_: object, **__: object) -> None:
        for _mode in range(_len_torch_function_stack()):
            _pop_mode()
        raise KeyboardInterrupt

    write_files(tmp_path / "it", checkpoint())
    with monkeypatch.context() as patch:
        patch.setattr(building, "build_graph", struck)
        with pytest.raises(KeyboardInterrupt):
            load(tmp_path / "it")
    assert _len_torch_function_stack() == 0
    assert load(tmp_path / "it").predict("the cat sat.")
