"""Configuration of the site, which Sphinx builds from this folder and the docstrings: `make docs`."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

project = "flodl-hf"
author = "the flodl-hf authors"
copyright = f"2026, {author}"
release = _PROJECT["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "public_names",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "pictures", "templates"]
templates_path = ["templates"]

# Headings have the same anchors as Markdown files on GitHub, so that links work in both.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]
# Links to files of the repository that are not pages are shown as text. A name that several modules define links to
# the first of them.
suppress_warnings = ["myst.xref_missing", "myst.header", "ref.python"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_use_ivar = True
# A name in single backticks links to the object of that name, if there is one.
default_role = "py:obj"

html_theme = "furo"
html_title = f"flodl-hf {release}"
html_static_path = ["pictures"]
html_extra_path = ["llms.txt"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "versions.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_theme_options = {"navigation_with_keys": True}
html_show_sphinx = False
# Prompts and output of console blocks are not copied.
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True
