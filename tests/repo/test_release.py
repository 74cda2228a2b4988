"""Files of a release: the checks of ``make release``, the versions that files state, and the list of site versions."""

from __future__ import annotations

import email.message
import re
import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if not (ROOT / ".ci").is_dir():
    pytest.skip("tested from a wheel, without the repository", allow_module_level=True)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
TOOL = runpy.run_path(str(ROOT / ".ci" / "release.py"))


def metadata(**changes: str) -> email.message.Message:
    """Metadata of a wheel as the build writes it."""
    made = email.message.Message()
    fields = {
        "Name": PROJECT["name"],
        "Version": PROJECT["version"],
        "Summary": PROJECT["description"],
        "License-Expression": PROJECT["license"],
        "Requires-Python": PROJECT["requires-python"],
        "Description-Content-Type": "text/markdown",
        **changes,
    }
    for field, value in fields.items():
        made[field] = value
    for label, url in PROJECT["urls"].items():
        made["Project-URL"] = f"{label}, {url}"
    for classifier in PROJECT["classifiers"]:
        made["Classifier"] = classifier
    made.set_payload("[a](https://host.example/x) [b](#part) " + "text " * 300)
    return made


def test_the_metadata_of_the_project_pass() -> None:
    assert TOOL["metadata_problems"](metadata(), PROJECT) == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"Version": "9"}, "Version"), ({"Summary": "short"}, "Summary"), ({"License-Expression": "GPL"}, "License")],
)
def test_wrong_fields_are_reported(changes: dict[str, str], field: str) -> None:
    (problem,) = TOOL["metadata_problems"](metadata(**changes), PROJECT)
    assert problem.startswith(field)


def test_missing_addresses_and_classifiers_and_relative_links_are_reported() -> None:
    made = metadata()
    del made["Project-URL"]
    del made["Classifier"]
    made.set_payload("![picture](docs/pictures/speed.svg) " + "text " * 300)
    found = " ".join(TOOL["metadata_problems"](made, PROJECT))
    for word in ("Repository", "Changelog", "Python 3.13", "docs/pictures/speed.svg"):
        assert word in found


def test_the_citation_has_the_version() -> None:
    assert f"version: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


def test_files_that_visitors_expect_exist() -> None:
    names = ["SECURITY.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "LICENSE", "skills/flodl-hf/SKILL.md"]
    names += [f".github/ISSUE_TEMPLATE/{name}.yml" for name in ("bug", "parity", "feature")]
    assert [name for name in names if not (ROOT / name).is_file()] == []


def test_versions_of_the_site_are_listed_newest_first(tmp_path: Path) -> None:
    for version in ("0.9.0", "0.10.0", "dev"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "objects.inv").touch()
    (tmp_path / "unfinished").mkdir()
    versions = runpy.run_path(str(ROOT / "docs" / "site.py"))["write_list"](tmp_path)
    assert versions == ["dev", "0.10.0", "0.9.0"]
    assert '["dev", "0.10.0", "0.9.0"]' in (tmp_path / "versions.js").read_text()
    assert re.search(r"url=0\.10\.0/", (tmp_path / "index.html").read_text())
