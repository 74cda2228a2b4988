"""Build the site of one version into ``build/site/VERSION``: ``python -m docs.site``.

Each version has a folder, and older folders stay. ``versions.js`` lists them for the switch in the side bar, and
``index.html`` of the root redirects to the newest release.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from docs.public_names import missing_names

DOCS = Path(__file__).parent
PROJECT = tomllib.loads((DOCS.parent / "pyproject.toml").read_text("utf-8"))["project"]


def build(root: Path, version: str) -> Path:
    """Build the pages of a version; warnings are errors."""
    target = root / version
    options = ["-b", "html", "-a", "-q", "-W", "--keep-going", "-D", f"release={version}"]
    subprocess.run([sys.executable, "-m", "sphinx", *options, DOCS, target], check=True)
    if missing := missing_names((target / "objects.inv").read_bytes()):
        raise SystemExit(f"docs/api: found no entry of the public names {', '.join(missing)}")
    return target


def write_list(root: Path) -> list[str]:
    """Write the list of versions and the redirection, and return the versions, newest first."""
    found = [folder.name for folder in root.iterdir() if (folder / "objects.inv").exists()]
    versions = sorted(found, key=order, reverse=True)
    (root / "versions.js").write_text(f"window.flodlVersions = {json.dumps(versions)};\n", "utf-8")
    newest = next((version for version in versions if version != "dev"), versions[0])
    page = '<!DOCTYPE html><meta charset="utf-8"><title>flodl-hf</title>\n'
    page += f'<meta http-equiv="refresh" content="0; url={newest}/">\n'
    (root / "index.html").write_text(page + f'<a href="{newest}/">flodl-hf {newest}</a>\n', "utf-8")
    return versions


def order(version: str) -> tuple[int, ...]:
    """Return the sort key of a version; ``dev`` is the newest."""
    return (2**31,) if version == "dev" else tuple(int(part) for part in re.findall(r"\d+", version))


def main() -> None:
    """Build a version and list all versions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", default=PROJECT["version"], help="folder of the version; default: pyproject.toml")
    parser.add_argument("--out", type=Path, default=DOCS.parent / "build" / "site", help="root of all versions")
    options = parser.parse_args()
    target = build(options.out, options.version)
    versions = write_list(options.out)
    print(f"{target / 'index.html'} (versions: {', '.join(versions)})")


if __name__ == "__main__":
    main()
