"""What a fine-tune would have understood in another way than it was meant is refused, with both ways to say it."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from finetune_tables import labelled, sentences, tagged

from flodl.errors import ConfigError, DataError
from flodl_hf import load
from flodl_hf.errors import ExportError
from flodl_hf.training import finetune, run
from flodl_hf.training.job import plan_job
from flodl_hf.training.options import make_options

TEXTS = sentences()
QUICK: dict[str, Any] = {"max_steps": 1, "batch_size": 4}


def pairs_of(names: tuple[str, ...], count: int) -> list[dict[str, Any]]:
    return [dict(zip(names, (TEXTS[i], TEXTS[i + 1], TEXTS[i + 2]), strict=False)) for i in range(count)]


@pytest.mark.parametrize("count", [4, 8, 60])
@pytest.mark.parametrize(
    "names", [("anchor", "positive"), ("anchor", "positive", "negative"), ("Anchor", "Positive"), ("query", "positive")]
)
def test_pairs_of_texts_train_vectors_and_are_no_classes(names: tuple[str, ...], count: int, base: Path) -> None:
    job = plan_job(base, pairs_of(names, count), None, make_options({}))
    assert (job.task.name, job.task.head, job.task.labels) == ("embedding", "base", None)
    assert [type(loss).__name__ for loss in job.task.losses] == ["MultipleNegativesRankingLoss"]


@pytest.mark.parametrize("task", ["embedding", "rank"])
def test_texts_of_one_row_each_are_not_read_in_windows(task: str, base: Path) -> None:
    rows = pairs_of(("anchor", "positive", "negative"), 8)
    with pytest.raises(ConfigError, match="long_texts: found 'windows'; expected 'truncate'"):
        plan_job(base, rows, None, make_options({"task": task, "long_texts": "windows"}))
    [note] = [
        n for n in plan_job(base, rows, None, make_options({"task": task, "max_length": 4})).notes if "truncated" in n
    ]
    assert "max_length" in note
    assert "long_texts" not in note


@pytest.mark.parametrize("count", [2, 8, 60])
@pytest.mark.parametrize("names", [("chosen", "rejected"), ("anchor", "negative"), ("text", "Positive")])
def test_texts_that_belong_together_are_no_classes(names: tuple[str, ...], count: int, base: Path) -> None:
    with pytest.raises(DataError, match="look like texts that belong together") as caught:
        finetune(base, train=pairs_of(names, count), **QUICK)
    assert caught.value.names == list(names)


def test_pairs_with_a_label_are_what_they_were(base: Path) -> None:
    rows = [{"anchor": row["text"], "label": row["label"]} for row in labelled(12)]
    assert plan_job(base, rows, None, make_options({})).task.kind == "single_label"


@pytest.mark.parametrize("names", [("left", "right"), ("one", "other")])
def test_a_second_column_of_texts_is_no_label(names: tuple[str, str], base: Path) -> None:
    rows = [dict(zip(names, (TEXTS[i], TEXTS[i + 1]), strict=True)) for i in range(12)]
    with pytest.raises(DataError, match="not clear"):
        finetune(base, train=rows, **QUICK)
    few = [{names[0]: row["text"], names[1]: row["label"]} for row in labelled(12)]
    assert plan_job(base, few, None, make_options({})).task.kind == "single_label"


def test_nearly_as_many_classes_as_rows_are_refused_unless_that_is_said(base: Path) -> None:
    rows = [{"text": TEXTS[i], "label": f"text number {i}"} for i in range(30)]
    with pytest.raises(DataError, match="expected fewer classes than rows") as caught:
        finetune(base, train=rows, **QUICK)
    assert caught.value.count == 30
    job = plan_job(base, rows, None, make_options({"problem_type": "single_label_classification"}))
    assert len(job.task.labels or ()) == 30


# ---- heads under other names -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("trained")
    for name, rows in (("texts", labelled(16)), ("words", tagged(16))):
        finetune(base, train=rows, out=folder / name, **QUICK, new_head=True)
    return {name: folder / name for name in ("texts", "words")}


def renamed(name: str) -> list[dict[str, Any]]:
    if name == "texts":
        return [{**row, "label": "a" if row["label"] == "praise" else "b"} for row in labelled(16)]
    return [{**row, "tags": [tag.replace("LONG", "WIDE") for tag in row["tags"]]} for row in tagged(16)]


@pytest.mark.parametrize("name", ["texts", "words"])
def test_a_trained_head_is_not_kept_under_other_names_without_a_word(name: str, trained: dict[str, Path]) -> None:
    before = load(trained[name]).graph.state_dict()
    for asked in (None, True, False):
        options = make_options({**QUICK, "new_head": asked})
        job = plan_job(trained[name], renamed(name), None, options)
        after = job.model.graph.state_dict()
        changed = {key for key in before if not torch.equal(before[key], after[key])}
        assert bool(changed) == (asked is not False)
        assert all(key.startswith("head.") for key in changed)
        again = plan_job(trained[name], renamed(name), None, options).model
        assert all(torch.equal(value, again.graph.state_dict()[key]) for key, value in after.items())
        [note] = job.notes
        assert ("is initialised again" in note) == (asked is not False)
    said: list[str] = []
    told = finetune(
        trained[name], train=renamed(name), on_event=lambda e: said.append(getattr(e, "message", "")), **QUICK
    )
    assert "is initialised again" in "".join(said)
    assert told.recipe["new_head"] is True


def test_another_order_of_the_same_names_has_a_new_head_too(trained: dict[str, Path]) -> None:
    names = list(load(trained["texts"]).config.labels)
    for labels, count in ((names, 0), (names[::-1], 1)):
        job = plan_job(trained["texts"], labelled(16), None, make_options({"labels": labels}))
        assert len(job.notes) == count
        old = load(trained["texts"]).graph.state_dict()["head.classifier.weight"]
        assert torch.equal(job.model.graph.state_dict()["head.classifier.weight"], old) == (not count)


def test_a_new_head_for_a_model_in_memory_is_refused(trained: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="folder or name"):
        finetune(load(trained["texts"]), train=labelled(16), new_head=True, **QUICK)


@pytest.mark.parametrize("options", [{}, {"lora": 2}])
def test_a_disk_without_room_is_refused_before_training(
    options: dict[str, Any], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "train_job", lambda *given, **words: pytest.fail("it trained"))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    rows = [{"text": text, "label": str(place % 2)} for place, text in enumerate(TEXTS)]
    with pytest.raises(ExportError, match="found 1,000 free") as caught:
        finetune(base, train=rows, out=tmp_path / "new" / "out", **options, **QUICK)
    whole = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    assert (caught.value.needed_bytes > 0.9 * whole) is not bool(options)
    assert not (tmp_path / "new").exists()


# ---- the command line --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said", "value"),
    [
        ("columns", ["text=a", "label=b"], {"text": "a", "label": "b"}),
        ("columns", ["text=a,label=b"], {"text": "a", "label": "b"}),
        ("columns", ["text=a", "text=a"], {"text": "a"}),
        ("labels", ["x", "y,z"], ["x", "y", "z"]),
        ("class_weights", ["x=1", "y=2"], {"x": 1.0, "y": 2.0}),
        ("class_weights", ["balanced"], "balanced"),
        ("devices", ["cpu", "cpu"], ["cpu", "cpu"]),
        ("devices", ["2"], 2),
    ],
)
def test_bits_of_an_option_add_up(name: str, said: list[str], value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from flodl_hf.cli import finetune as command
    from flodl_hf.cli.app import app

    seen: list[Any] = []
    monkeypatch.setattr(command, "_run", lambda values, said: seen.append(values))
    monkeypatch.setattr(command, "check_places", lambda *given: None)
    flag = "--" + name.replace("_", "-")
    result = CliRunner().invoke(app, ["finetune", "m", "--train", "t", *(part for bit in said for part in (flag, bit))])
    assert result.exit_code == 0, result.output
    assert seen[0][name] == value


def test_one_name_with_two_values_is_refused() -> None:
    pytest.importorskip("typer")
    from flodl_hf.cli.finetune import parse

    with pytest.raises(ConfigError, match="several values for text"):
        parse("columns", ["text=a", "text=b"])


def test_held_out_sentences_with_tags_that_are_no_labels_are_named_as_such(base: Path) -> None:
    held_out = [*tagged(2), {"words": ["nowhere"], "tags": ["B-NEW"]}]
    with pytest.raises(DataError, match="eval: evaluation sentences that cannot be labelled") as caught:
        finetune(base, train=tagged(8), eval=held_out, **QUICK)
    assert "row 2" in str(caught.value)
    assert "'B-NEW'" in str(caught.value)


def test_spans_that_end_behind_their_text_are_refused(base: Path) -> None:
    rows = [{"text": "the king is", "spans": [{"start": 4, "end": end, "label": "PER"}]} for end in (8, 12)] * 2
    with pytest.raises(DataError, match=r"spans \[\(4, 12, 'PER'\)\] end behind the text, which has 11 characters"):
        finetune(base, train=rows, task="tokcls", **QUICK)


def test_a_missing_label_of_a_data_frame_is_told_as_missing(base: Path) -> None:
    rows = [{"text": text, "label": label} for text, label in zip(TEXTS, ["a", float("nan")] * 4, strict=False)]
    with pytest.raises(DataError, match="labels: found none in 4 of 8 rows, first in row 1"):
        plan_job(base, rows, None, make_options({}))
