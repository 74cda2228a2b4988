"""``python -m tests.torture``; see `tests.torture.command`."""

from __future__ import annotations

from tests.torture.command import main

if __name__ == "__main__":
    raise SystemExit(main())
