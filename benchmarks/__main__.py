"""Run the measurements one after another: ``python -m benchmarks [NAME ...]``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

NAMES = sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in ("__init__", "__main__", "models"))


def main() -> None:
    wanted = sys.argv[1:] or ["graph_overhead", "loading"]
    unknown = [name for name in wanted if name not in NAMES]
    if unknown:
        raise SystemExit(f"no measurement {unknown[0]!r}; there are {', '.join(NAMES)}")
    for name in wanted:
        print(f"\n== {name}")
        sys.argv = [name]
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")


if __name__ == "__main__":
    main()
