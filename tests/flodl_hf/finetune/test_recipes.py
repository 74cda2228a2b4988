"""Recipes: maps merge deep, all else replaces, null removes, and every value knows where it was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flodl.errors import ConfigError
from flodl_hf.training.recipe import load_recipe


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder / next(iter(files))


BASE = "epochs: 3\nlabels: [a, b]\ncolumns:\n  text: body\n  label: kind\n"


@pytest.mark.parametrize(
    ("overlay", "values"),
    [
        ("epochs: 1", {"epochs": 1, "labels": ["a", "b"], "columns": {"text": "body", "label": "kind"}}),
        ("labels: [c]", {"epochs": 3, "labels": ["c"], "columns": {"text": "body", "label": "kind"}}),
        ("columns: {text: t}", {"epochs": 3, "labels": ["a", "b"], "columns": {"text": "t", "label": "kind"}}),
        ("columns: {text: null}", {"epochs": 3, "labels": ["a", "b"], "columns": {"label": "kind"}}),
        ("columns: null", {"epochs": 3, "labels": ["a", "b"]}),
        ("columns: 4", {"epochs": 3, "labels": ["a", "b"], "columns": 4}),
        (
            "epochs: {deep: 1}",
            {"epochs": {"deep": 1}, "labels": ["a", "b"], "columns": {"text": "body", "label": "kind"}},
        ),
        ("", {"epochs": 3, "labels": ["a", "b"], "columns": {"text": "body", "label": "kind"}}),
        ("absent: null", {"epochs": 3, "labels": ["a", "b"], "columns": {"text": "body", "label": "kind"}}),
    ],
)
def test_an_overlay_merges(tmp_path: Path, overlay: str, values: dict[str, Any]) -> None:
    top = write(tmp_path, {"run.yaml": BASE, "run.ci.yaml": overlay})
    assert load_recipe(top, "ci").values == values
    assert load_recipe(top).values["epochs"] == 3


def test_every_value_names_the_file_and_line_that_wrote_it(tmp_path: Path) -> None:
    top = write(
        tmp_path,
        {
            "run.yaml": "inherit-from: common/base.yaml\nlr: 1.0e-4\n",
            "common/base.yaml": "inherit-from: [ground.yaml]\nepochs: 2\ncolumns:\n  text: t\n",
            "common/ground.yaml": "# all runs\nseed: 7\nlr: 1.0\ncolumns: {label: l}\n",
            "run.ci.yaml": "\nmax_steps: 5\ncolumns:\n  text: u\n",
        },
    )
    recipe = load_recipe(top, "ci")
    assert {path: (value, origin) for path, value, origin in recipe.rows} == {
        "seed": (7, "ground.yaml:2"),
        "lr": (1e-4, "run.yaml:2"),
        "columns.label": ("l", "ground.yaml:4"),
        "columns.text": ("u", "run.ci.yaml:4"),
        "epochs": (2, "base.yaml:2"),
        "max_steps": (5, "run.ci.yaml:2"),
    }
    assert [file.name for file in recipe.files] == ["ground.yaml", "base.yaml", "run.yaml", "run.ci.yaml"]


def test_a_circle_is_named(tmp_path: Path) -> None:
    top = write(
        tmp_path,
        {"a.yaml": "inherit-from: b.yaml", "b.yaml": "inherit-from: c.yaml", "c.yaml": "inherit-from: a.yaml"},
    )
    with pytest.raises(ConfigError) as caught:
        load_recipe(top)
    assert caught.value.problems == ["a.yaml", "b.yaml", "c.yaml", "a.yaml"]


def test_two_that_inherit_from_one_are_no_circle(tmp_path: Path) -> None:
    top = write(
        tmp_path,
        {
            "a.yaml": "inherit-from: [b.yaml, c.yaml]",
            "b.yaml": "inherit-from: d.yaml\nlr: 2.0",
            "c.yaml": "inherit-from: d.yaml",
            "d.yaml": "lr: 1.0",
        },
    )
    # c comes later and brings d with it, which therefore lies over b
    assert load_recipe(top).values == {"lr": 1.0}


@pytest.mark.parametrize(
    "text",
    [
        "epochs: 1\nepochs: 2",
        "- a list",
        "epochs: [1",
        "a: !!python/object/apply:os.getcwd []",
        "a: &x 1\nb:\n  <<: {c: 1}",
        "inherit-from: 3",
        "inherit-from: missing.yaml",
        "? [a, b]\n: 1",
    ],
)
def test_what_a_recipe_may_not_hold_is_refused(tmp_path: Path, text: str) -> None:
    top = write(tmp_path, {"run.yaml": text})
    with pytest.raises(ConfigError) as caught:
        load_recipe(top)
    assert caught.value.problems


def test_words_that_yaml_reads_as_truth_stay_words_as_keys(tmp_path: Path) -> None:
    top = write(tmp_path, {"run.yaml": "class_weights: {no: 1.0, yes: 3.0}"})
    assert load_recipe(top).values == {"class_weights": {"no": 1.0, "yes": 3.0}}


def test_an_environment_without_an_overlay_is_refused_and_those_there_are_named(tmp_path: Path) -> None:
    top = write(tmp_path, {"run.yaml": "a: 1", "run.ci.yaml": "", "run.big.yaml": ""})
    with pytest.raises(ConfigError, match="overlays for: big, ci"):
        load_recipe(top, "prod")
    with pytest.raises(ConfigError):
        load_recipe(top, "../x")


TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.text("abc. ", max_size=3)
    | st.lists(st.integers(0, 3), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from(["a", "b", "c.d", "no"]), inner, max_size=3),
    max_leaves=8,
)
MAPS = st.dictionaries(st.sampled_from(["a", "b", "c", "e f"]), TREES, max_size=4)


def expected(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        if isinstance(value, dict):
            beneath = result.get(key)
            result[key] = expected(beneath if isinstance(beneath, dict) else {}, value)
        elif value is None:
            result.pop(key, None)
        else:
            result[key] = value
    return result


def pruned(tree: dict[str, Any]) -> dict[str, Any]:
    """Leave out maps in which nothing is said."""
    found = {k: pruned(v) if isinstance(v, dict) else v for k, v in tree.items()}
    return {k: v for k, v in found.items() if v != {}}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(below=MAPS, above=MAPS)
def test_merging_is_what_it_says_and_every_value_has_an_origin(
    tmp_path: Path, below: dict[str, Any], above: dict[str, Any]
) -> None:
    top = write(tmp_path, {"run.yaml": json.dumps(below), "run.ci.yaml": json.dumps(above)})
    recipe = load_recipe(top, "ci")
    assert recipe.values == pruned(expected(expected({}, below), above))
    for _, value, origin in recipe.rows:
        assert not isinstance(value, dict)
        assert origin.partition(":")[0] in ("run.yaml", "run.ci.yaml")
