"""The generated pages equal the tables of the program, and the documents list every command, family, head and name."""

from __future__ import annotations

import inspect
import json
import re
import runpy
import zlib
from pathlib import Path

import pytest

from flodl_hf import families as families_known
from flodl_hf.cli.docs import Parsed, exported, options_of, parsed, public_modules, public_names
from flodl_hf.families import FAMILIES
from flodl_hf.families.schema.tasks import HEADS

ROOT = Path(__file__).parents[2]
TOOLS = runpy.run_path(str(ROOT / "docs" / "generate.py"))
PAGES = TOOLS["pages"]()


@pytest.mark.parametrize("name", PAGES)
def test_the_committed_page_is_what_is_generated(name: str) -> None:
    committed = (ROOT / "docs" / "reference" / name).read_text("utf-8")
    assert committed == PAGES[name], f"docs/reference/{name} is out of date: make docs"


def test_the_table_of_families_is_what_is_generated() -> None:
    page = (ROOT / "docs" / "which-models.md").read_text("utf-8")
    assert page == TOOLS["with_overview"](page), "docs/which-models.md is out of date: make docs"
    assert all(f"| `{family.model_type}` |" in page for family in FAMILIES)


def test_the_index_of_families_is_what_their_files_say() -> None:
    assert TOOLS["INDEX"].read_text("utf-8") == TOOLS["families_index"](), "index.json is out of date: make docs"
    files = sorted(path.stem for path in TOOLS["INDEX"].parent.glob("[!_]*.py"))
    assert sorted(families_known.FILES) == files
    assert families_known.model_types() == [family.model_type for family in FAMILIES]


def test_speeds_are_those_that_were_measured() -> None:
    page = TOOLS["SPEED"].read_text("utf-8")
    assert page == TOOLS["with_speeds"](page), "docs/performance-families.md is out of date: make docs"
    models = (ROOT / "docs" / "which-models.md").read_text("utf-8")
    rows = [row for row in TOOLS["measured"]() if not row["length"]]
    assert {row["family"] for row in rows} <= {family.model_type for family in FAMILIES}
    for row in rows:
        (line,) = [line for line in models.splitlines() if line.startswith(f"| `{row['family']}` |")]
        unit = 1e3 if row["kind"] == "cuda" else 1
        assert f"| {row['tokens_per_s'] / unit:,.0f}" in (line if row["kind"] == "cuda" else page)
    assert all((row["transformers_tokens_per_s"] is None) == bool(row["lacking"]) for row in rows)
    with pytest.raises(AssertionError, match="is missing"):
        TOOLS["between"]("a page without marks", "families", "text")


def test_the_list_for_language_models_is_what_is_generated() -> None:
    assert (ROOT / "docs" / "llms.txt").read_text("utf-8") == TOOLS["llms"](), "docs/llms.txt is out of date: make docs"
    assert "tasks/entities.md.txt" in TOOLS["llms"]()


def test_no_page_is_left_over() -> None:
    assert {path.name for path in (ROOT / "docs" / "reference").iterdir()} == set(PAGES)


def test_every_family_and_head_stands_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    words = [family.model_type for family in FAMILIES] + [head.short for head in HEADS]
    assert [word for word in words if f"`{word}`" not in readme] == []


def test_every_row_stands_in_the_reference() -> None:
    page = PAGES["families.md"]
    for family in FAMILIES:
        rows = [*family.keys, *(row for head in family.heads.values() for row in head.keys)]
        assert [row.theirs for row in rows if f"`{row.theirs}`" not in page] == []
        assert [row.key for row in family.rows if f"`{row.key}`" not in page] == []
        assert [entry.reason for entry in (*family.ignored_keys, *family.ignored) if entry.reason not in page] == []


def test_every_command_stands_in_the_guide() -> None:
    from flodl_hf.cli.app import app

    guides = "".join(path.read_text("utf-8") for path in (ROOT / "docs" / "guides").glob("cli*.md"))
    headings = set(re.findall(r"^## (.+)$", guides, re.MULTILINE))
    assert headings == {entry.name for entry in (*app.registered_commands, *app.registered_groups)}


def test_the_picture_of_speed_has_the_figures_of_the_tables() -> None:
    from docs.draw_speed import BARS, PICTURE, draw

    assert PICTURE.read_text("utf-8") == draw()
    page = (ROOT / "docs" / "performance.md").read_text("utf-8")
    for bar in BARS:
        table = page.split(f"## {bar.source}\n", 1)[1].split("\n## ", 1)[0]
        for figure in (bar.ours, bar.theirs):
            shown = f"{figure:,.2f}" if figure < 10 else f"{figure:,.1f}".removesuffix(".0")
            assert shown in table, f"{bar.what}: {shown} is not in {bar.source}"


def test_the_api_pages_list_every_public_module_once() -> None:
    """`make docs` compares the built inventory with `__all__` of these modules."""
    pages = [path.read_text("utf-8") for path in sorted((ROOT / "docs" / "api").glob("*.md"))]
    listed = [module for page in pages for module in re.findall(r"^\.\. public:: (\S+)$", page, re.MULTILINE)]
    assert sorted(listed) == sorted(public_modules())


def test_public_names_have_a_description() -> None:
    found = dict(public_names())
    assert {"flodl_hf.finetune", "flodl_hf.training.Options", "flodl_hf.serving.serving", "flodl.Trainer"} <= set(found)
    routines = {name: value for name, value in found.items() if inspect.isclass(value) or inspect.isroutine(value)}
    assert [name for name, value in routines.items() if not inspect.getdoc(value)] == []
    read = {name: value for name, value in found.items() if isinstance(value, Parsed)}
    described = [one for value in read.values() for one in (value, *value.members)]
    assert "flodl_hf.compat.transformers.pipeline" in read
    assert [one.name for one in described if not one.description] == []
    assert all(option["summary"] for option in options_of(found["flodl_hf.training.Options"]))


def test_a_name_without_an_entry_is_reported() -> None:
    pytest.importorskip("sphinx")
    missing_names = runpy.run_path(str(ROOT / "docs" / "public_names.py"))["missing_names"]
    names = [f"{module}.{name}" for module in public_modules() for name in exported(module)]
    lines = "".join(f"{name} py:class 1 api.html#$ -\n" for name in names if name != "flodl_hf.finetune")
    inventory = b"# Sphinx inventory version 2\n# Project: x\n# Version: 1\n# zlib\n" + zlib.compress(lines.encode())
    assert missing_names(inventory) == ["flodl_hf.finetune"]


def test_a_name_is_described_in_the_terminal() -> None:
    from typer.testing import CliRunner

    from flodl_hf.cli.app import app

    def run(*words: str) -> str:
        result = CliRunner().invoke(app, ["docs", *words])
        assert result.exit_code == 0, result.output
        return result.stdout

    # Without the library.
    assert json.loads(run("FlodlEmbeddings", "--json"))["members"][0]["name"] == "embed_documents"
    assert run("TextClassifier.fit").startswith("flodl_hf.compat.sklearn.TextClassifier.fit(X: ")

    entry = json.loads(run("Options", "--json"))
    assert entry["name"] == "flodl_hf.training.Options"
    assert {"name": "epochs", "default": " = 3", "summary": "Number of epochs."} in entry["options"]
    assert json.loads(run("Trainer.fit", "--json"))["name"] == "flodl.Trainer.fit"
    assert run("flodl_hf.load").startswith("flodl_hf.load(")
    assert "flodl_hf.finetune" in {one["name"] for one in json.loads(run("--list", "--json"))}
    wrong = CliRunner().invoke(app, ["docs", "fintune"])
    assert (wrong.exit_code, "'finetune'" in wrong.stderr) == (1, True)


def test_asynchronous_functions_and_methods_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "class Client:\n    async def run(self, a: int) -> str: ...\n\nasync def start(b): ...\n"
    (tmp_path / "asynchronous.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert [one.signature for one in parsed("asynchronous", "Client").members] == ["(a: int) -> str"]
    assert parsed("asynchronous", "start").signature == "(b)"
