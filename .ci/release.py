"""Build the release files, check their metadata, and test the wheel in empty environments: ``make release``.

Exit status 1 if a check fails. Addresses of the reserved domain ``.example`` are reported and do not fail.
"""

from __future__ import annotations

import argparse
import email.message
import email.parser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
PAGES = ("README.md", "docs/guides/ten-minutes.md")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def build(target: Path) -> tuple[Path, Path]:
    """Build both files from a clean copy of the tracked files, and return sdist and wheel."""
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", target, ROOT], check=True, stdout=subprocess.DEVNULL)
    (sdist,), (wheel,) = target.glob("*.tar.gz"), target.glob("*.whl")
    return sdist, wheel


def problems_of(sdist: Path, wheel: Path) -> list[str]:
    """Return what is wrong with the files and their metadata."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
        name = next(file for file in files if file.endswith(".dist-info/METADATA"))
        metadata = email.parser.Parser().parsestr(archive.read(name).decode())
    with tarfile.open(sdist) as archive:
        sources = {entry.name.partition("/")[2] for entry in archive.getmembers()}
    needed = {"flodl_hf/py.typed", "flodl/py.typed", "flodl_hf/families/index.json", "flodl_hf/__init__.py"}
    kept = {"README.md", "CHANGELOG.md", "LICENSE", "SECURITY.md", "CITATION.cff", "tests/conftest.py", "docs/index.md"}
    found = metadata_problems(metadata, project)
    found += [f"wheel: {file} is missing" for file in sorted(needed - set(files))]
    found += [f"wheel: {f} is not part of the packages" for f in files if not f.startswith(("flodl/", "flodl_hf"))]
    found += [f"sdist: {file} is missing" for file in sorted(kept - sources)]
    if not wheel.name.endswith("-py3-none-any.whl"):
        found.append(f"wheel: found {wheel.name}, expected py3-none-any")
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    if not re.search(rf"^## \[?{re.escape(project['version'])}\]? - \d{{4}}-\d\d-\d\d$", changes, re.MULTILINE):
        found.append(f"CHANGELOG.md: found no heading '## [{project['version']}] - YYYY-MM-DD'")
    if f"version: {project['version']}\n" not in (ROOT / "CITATION.cff").read_text("utf-8"):
        found.append(f"CITATION.cff: expected version: {project['version']}")
    return found


def metadata_problems(metadata: email.message.Message, project: dict) -> list[str]:
    """Return what is wrong with the metadata of a wheel."""
    found = []
    expected = {
        "Name": project["name"],
        "Version": project["version"],
        "License-Expression": "MIT",
        "Requires-Python": project["requires-python"],
        "Description-Content-Type": "text/markdown",
    }
    for field, value in expected.items():
        if metadata[field] != value:
            found.append(f"{field}: found {metadata[field]!r}, expected {value!r}")
    if not 20 <= len(metadata["Summary"] or "") <= 200:
        found.append("Summary: expected 20 to 200 characters")
    urls = dict(entry.split(", ", 1) for entry in metadata.get_all("Project-URL", []))
    for label in ("Documentation", "Repository", "Issues", "Changelog"):
        if not urls.get(label, "").startswith("https://"):
            found.append(f"Project-URL {label}: found {urls.get(label)!r}, expected an https address")
    classifiers = metadata.get_all("Classifier", [])
    missing = [v for v in PYTHONS if f"Programming Language :: Python :: {v}" not in classifiers]
    found += [f"Classifier: Python {version} is missing" for version in missing]
    found += classifier_problems(classifiers)
    text = str(metadata.get_payload())
    relative = [link for link in _LINK.findall(text) if not link.startswith(("https://", "#"))]
    found += [f"long description: the link {link} is relative" for link in relative]
    if len(text) < 1000:
        found.append("long description: found less than 1,000 characters")
    return found


def classifier_problems(classifiers: list[str]) -> list[str]:
    """Return classifiers that package indexes do not know; the list of them is an optional package."""
    try:
        from trove_classifiers import classifiers as known
    except ImportError:
        known = {c for c in classifiers if " :: " in c}
    return [f"Classifier: {c!r} is unknown" for c in classifiers if c not in known]


def interpreter(version: str) -> str | None:
    """Return an executable of a Python version; None if there is none."""
    candidates = [shutil.which(f"python{version}")]
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates += [str(path) for path in sorted(versions.glob(f"{version}.*/bin/python"))]
    if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
        candidates.insert(0, sys.executable)
    for path in filter(None, candidates):
        probe = [path, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
        answer = subprocess.run(probe, capture_output=True, text=True, check=False)
        if answer.stdout.strip() == version:
            return path
    return None


def try_wheel(wheel: Path, python: str, work: Path) -> None:
    """Install the wheel into an empty environment, then run the demo, README and tutorial in empty folders."""
    subprocess.run([python, "-m", "venv", work / "venv"], check=True)
    binaries = work / "venv" / "bin"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1"}
    environment.setdefault("OMP_NUM_THREADS", "2")
    install = [binaries / "pip", "install", "-q", "--no-compile", "-c", ROOT / "constraints.txt", f"{wheel}[cli]"]
    subprocess.run(install, check=True, env=environment)
    for name in ("demo", *PAGES):
        folder = work / Path(name).stem
        folder.mkdir()
        if name == "demo":
            command = [binaries / "flodl-hf", "demo"]
        else:
            for file in ("tests/docs/blocks.py", name):
                shutil.copy(ROOT / file, folder)
            if (work / "demo" / "demo-model").is_dir() and name != "README.md":
                shutil.copytree(work / "demo" / "demo-model", folder / "demo-model")
            command = [binaries / "python", "blocks.py", Path(name).name]
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=name == "demo", check=False)
        if ended.returncode:
            raise SystemExit(f"{wheel.name}: {name} failed in an empty environment: exit status {ended.returncode}")


def main() -> None:
    """Build, check and test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the files; replaced")
    parser.add_argument("--python", action="append", help="version to test, repeatable; default: 3.11, 3.12, 3.13")
    parser.add_argument("--wheel", type=Path, help="test this wheel and build nothing")
    options = parser.parse_args()
    if options.wheel is None:
        sdist, wheel = build(options.out)
        found = problems_of(sdist, wheel)
        print(*(f"failed: {problem}" for problem in found), sep="\n", end="\n" if found else "")
        if found:
            raise SystemExit(1)
        print(f"metadata passed: {sdist.name} ({sdist.stat().st_size / 1e6:.1f} MB), {wheel.name}", flush=True)
    else:
        wheel = options.wheel.resolve()
    tested = []
    for version in options.python or PYTHONS:
        python = interpreter(version)
        if python is None:
            print(f"Python {version}: not installed, skipped", flush=True)
            continue
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as work:
            try_wheel(wheel.resolve(), python, Path(work))
        print(f"Python {version}: demo, README and tutorial passed in {time.monotonic() - started:.0f} s", flush=True)
        tested.append(version)
    if not tested:
        raise SystemExit("found no Python to test the wheel with")
    if ".example/" in (ROOT / "pyproject.toml").read_text("utf-8"):
        print("Before an upload: replace the .example addresses in [project.urls] of pyproject.toml.")


if __name__ == "__main__":
    main()
