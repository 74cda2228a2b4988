"""``python -m tests.peers``; see `tests.peers.command`."""

from __future__ import annotations

from tests.peers.command import main

if __name__ == "__main__":
    raise SystemExit(main())
