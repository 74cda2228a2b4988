"""Run benchmarks one after another: ``python -m benchmarks [NAME ...]``."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
DEFAULT = ("graph_overhead", "loading")


def names() -> list[str]:
    """Return the names of all benchmarks: programs in this folder, and packages with a program."""
    modules = [path for path in FOLDER.glob("*.py") if not path.stem.startswith("__")]
    runnable = [path.stem for path in modules if '\nif __name__ == "__main__":' in path.read_text("utf-8")]
    return sorted(runnable + [path.parent.name for path in FOLDER.glob("*/__main__.py")])


def main(requested: list[str]) -> None:
    """Run the requested benchmarks, or the default ones."""
    known = names()
    unknown = [name for name in requested if name not in known]
    if unknown:
        raise SystemExit(f"benchmarks: found {unknown[0]!r}, expected one of {', '.join(known)}")
    for name in requested or DEFAULT:
        print(f"\n== {name}", flush=True)
        sys.argv = [name]
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run benchmarks one after another.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(names())}; default {', '.join(DEFAULT)}")
    main(parser.parse_args().names)
