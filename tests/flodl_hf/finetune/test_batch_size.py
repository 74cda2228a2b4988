"""The batch size that nobody said: less than 32 where a run would have too few steps, and the same one when it goes on."""

from __future__ import annotations

import json
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from finetune_tables import TABLES, labelled

from flodl_hf.training import finetune
from flodl_hf.training.batching import ENOUGH, SIZES, few_steps, steps_of, usual_batch_size
from flodl_hf.training.job import plan_job
from flodl_hf.training.options import Options, make_options

ROWS = sorted({1, 2, *(k * 7 for k in range(1, 30)), *(2**k + d for k in range(2, 17) for d in (-1, 0, 1))})
LABELS, TOKENS = ENOUGH["sequence_classification"], ENOUGH["token_classification"]
BOUNDS = (None, 1, 30, LABELS, 1000, TOKENS)


def usual(rows: int, ranks: int = 1, enough: int = LABELS, **options: Any) -> int:
    return usual_batch_size(rows, enough, Options(**options), ranks)


@pytest.mark.parametrize(
    ("enough", "epochs", "accumulate", "bound"), [*product((LABELS, TOKENS), (1, 3, 10), (1, 4), BOUNDS)]
)
def test_more_rows_never_make_smaller_batches(enough: int, epochs: int, accumulate: int, bound: int | None) -> None:
    options = Options(epochs=epochs, accumulate=accumulate, max_steps=bound)
    found = [usual_batch_size(rows, enough, options) for rows in ROWS]
    assert all(a <= b for a, b in pairwise(found))
    assert found == [usual_batch_size(rows, enough, options) for rows in ROWS]
    wanted = min(enough, bound or enough)
    for rows, size in zip(ROWS, found, strict=True):
        assert size in SIZES
        assert size == SIZES[-1] or steps_of(rows, size, options) >= wanted
        larger = SIZES[SIZES.index(size) - 1] if size != SIZES[0] else None
        assert larger is None or steps_of(rows, larger, options) < wanted


def test_longer_runs_and_fewer_wanted_steps_never_make_smaller_batches() -> None:
    for rows in ROWS:
        assert all(usual(rows, epochs=a) <= usual(rows, epochs=b) for a, b in pairwise((1, 2, 3, 5, 8, 100)))
        assert all(usual(rows, accumulate=a) >= usual(rows, accumulate=b) for a, b in pairwise((1, 2, 4, 16)))
        assert all(usual(rows, max_steps=a) >= usual(rows, max_steps=b) for a, b in pairwise((1, 30, 100, 10_000)))


@pytest.mark.parametrize("ranks", [1, 2, 4, 5, 8, 16, 17, 32, 64])
def test_each_rank_has_a_row_of_a_batch(ranks: int) -> None:
    assert min(usual(rows, ranks) for rows in ROWS) == min((s for s in SIZES if s >= ranks), default=32)


def test_a_long_run_has_32_rows_in_a_batch() -> None:
    assert {usual(rows) for rows in (LABELS * 32 // 3, 6_920, 67_349, 10**7)} == {32}
    assert {usual(rows, enough=TOKENS) for rows in (TOKENS * 32 // 3, 14_041, 88_000)} == {32}


def test_heads_that_mark_tokens_get_more_steps() -> None:
    assert (usual(3_394), usual(3_394, enough=TOKENS), usual(925, enough=TOKENS)) == (32, 8, 4)
    assert {task for task, steps in ENOUGH.items() if steps == TOKENS} == {"token_classification", "question_answering"}


@pytest.mark.parametrize("said", [1, 3, 32, 100])
def test_a_number_that_is_said_is_obeyed_and_not_spoken_of(said: int, base: Path) -> None:
    lines: list[str] = []
    job = plan_job(base, labelled(48), None, make_options({"batch_size": said}), tell=lines.append)
    assert (job.options.batch_size, job.options.eval_batch_size, job.batches.batch_size) == (said, None, said)
    assert not any(line.startswith("batch_size") for line in lines)


def test_what_is_chosen_is_said_in_a_line_and_stands_in_the_plan(base: Path) -> None:
    lines: list[str] = []
    job = plan_job(base, labelled(48), labelled(4), make_options({}), tell=lines.append)
    assert (job.options.batch_size, job.batches.batch_size, job.steps) == (4, 4, 36)
    assert lines[1] == "batch_size: 4 (48 rows: 36 steps in place of 6; batch_size=32 to overrule)"
    assert job.evaluation is not None
    assert job.evaluation.sets[""].batch_size == job.options.eval_batch_size == 32


LEFT: dict[str, dict[str, Any]] = {
    "masked_lm": {},
    "embedding": {"task": "embedding"},
    "rank": {"task": "rank"},
    "sequence_classification": {"tokens_per_batch": 200},
}


@pytest.mark.parametrize("task", LEFT)
def test_batches_that_are_compared_or_counted_otherwise_are_left_alone(task: str, base: Path) -> None:
    pairs = [
        {"question": f"{row['text']} {k}", "passage": row["text"], "label": k % 2} for k, row in enumerate(labelled(24))
    ]
    rows = {"embedding": [{"anchor": r["question"], "positive": r["passage"]} for r in pairs], "rank": pairs}
    job = plan_job(base, rows.get(task) or TABLES[task](24), None, make_options(LEFT[task]))
    assert (job.options.batch_size, job.options.eval_batch_size) == (32, None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"task": "sequence_classification", "batch_size": 4}, "more epochs or more rows"),
        ({"task": "rank", "batch_size": 32}, "more epochs or a smaller batch_size (now 32)"),
        (
            {"task": "token_classification", "tokens_per_batch": 90},
            "more epochs or a smaller tokens_per_batch (now 90)",
        ),
        ({"task": "masked_lm", "batch_size": 4}, None),
        ({"task": "sequence_classification", "batch_size": 4, "max_steps": 9}, None),
    ],
)
def test_few_steps_are_told_with_what_helps(options: dict[str, Any], said: str | None) -> None:
    found = few_steps(9, Options(**options))
    assert (said is None) == (found is None)
    assert said is None or (found is not None and said in found)
    assert few_steps(1000, Options(**options)) is None


class Stopped(BaseException):
    """What ends a run from outside in this test."""


def test_a_run_goes_on_with_the_batch_size_that_it_began_with(base: Path, tmp_path: Path) -> None:
    rows, out = labelled(48), tmp_path / "out"
    given: dict[str, Any] = {"train": rows[:40], "eval": rows[40:], "lr": 2e-3, "schedule": "constant", "report": False}

    def stop(event: Any) -> None:
        if type(event).__name__ == "StepDone" and event.step == 3:
            raise Stopped

    with pytest.raises(Stopped):
        finetune(base, out=out, on_event=stop, save_every=1, **given)
    assert usual(40, max_steps=6) == 32 > usual(40) == 4  # so short a run would not have had smaller batches by itself
    rest = finetune(base, out=out, resume=["schedule"], max_steps=6, **given)
    whole = finetune(base, max_steps=6, batch_size=4, eval_batch_size=32, **given)
    assert (rest.recipe["batch_size"], rest.losses, rest.metrics) == (4, whole.losses, whole.metrics)
    assert json.loads((out / "training.json").read_text())["batch_size"] == 4
    assert "| batch_size | 4 |" in (out / "README.md").read_text()
    assert "\nbatch_size: 4\n" in (out / "recipe.yaml").read_text()
