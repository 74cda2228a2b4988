"""Levels of messages: variable and flag, and the messages of each level."""

import json

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from flodl.errors import ConfigError
from flodl.progress import Progress
from flodl.train import Callback, Trainer, sgd
from flodl.verbosity import Verbosity, parsed, set_verbosity, verbosity


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    monkeypatch.delenv("FLODL_VERBOSITY", raising=False)
    monkeypatch.delenv("FLODL_PROGRESS", raising=False)


@pytest.mark.parametrize(
    ("text", "level"),
    [("quiet", 0), ("0", 0), ("Normal", 1), (" 2 ", 2), ("verbose", 2), ("debug", 3), ("4", 4), ("trace", 4), (3, 3)],
)
def test_words_and_numbers(text, level, monkeypatch):
    assert parsed(text) == level
    monkeypatch.setenv("FLODL_VERBOSITY", str(text))
    assert verbosity() is Verbosity(level)


def test_nothing_and_nonsense_are_normal_and_nonsense_is_refused_in_a_call(monkeypatch):
    assert verbosity() is Verbosity.NORMAL
    monkeypatch.setenv("FLODL_VERBOSITY", "loud")
    assert verbosity() is Verbosity.NORMAL
    for wrong in ("verbos", "5", -1, ""):
        with pytest.raises(ConfigError, match="expected quiet"):
            set_verbosity(wrong)


def test_a_level_is_set_and_put_back():
    assert set_verbosity("debug") is Verbosity.NORMAL
    assert verbosity() is Verbosity.DEBUG
    assert set_verbosity(Verbosity.QUIET) is Verbosity.DEBUG


class Warns(Callback):
    def on_train_begin(self, trainer):
        trainer.warn("mind this")


def run(tmp_path):
    torch.manual_seed(0)
    data = {"x": torch.randn(12, 3), "y": torch.randn(12, 1)}

    def step(model, batch):
        return mse_loss(model(batch["x"]), batch["y"])

    made = Trainer.builder(nn.Linear(3, 1), sgd(0.1), step).dataset(data).batch_size(4).num_epochs(1)

    made.checkpoints(str(tmp_path / "run")).set(callbacks=[Warns()])
    made.set(progress=None if verbosity() == Verbosity.QUIET else True).run()


@pytest.mark.parametrize("level", list(Verbosity))
def test_each_level_includes_the_messages_of_lower_levels(level, tmp_path, capfd):
    set_verbosity(level)
    run(tmp_path)
    printed = capfd.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert any("mind this" in line for line in lines)  # warnings at every level
    found = {
        "progress": any("epoch 1: loss" in line for line in lines),
        "checkpoints": any("checkpoint" in line and "MiB" in line for line in lines),
        "ranks": any("epoch 1, rank 0:" in line for line in lines),
        "events": sum(line.startswith('{"event": "StepDone"') for line in lines) == 3,
    }
    levels = {"progress": 1, "checkpoints": 2, "ranks": 3, "events": 4}
    assert found == {kind: level >= least for kind, least in levels.items()}
    for line in lines:
        if line.startswith("{"):
            assert json.loads(line)["event"]
    if level == Verbosity.QUIET:
        assert lines == ["warning: mind this"]


def test_requested_progress_is_shown_at_every_level():
    import io

    set_verbosity("quiet")
    for show, seen in ((None, False), (True, True)):
        stream = io.StringIO()
        with Progress("work", 2, show=show, stream=stream, now=iter(range(99)).__next__) as progress:
            progress.advance()
            progress.say("a line")
        assert ("a line" in stream.getvalue()) is seen
