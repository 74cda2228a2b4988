"""``python -m flodl_hf.torture``; see `flodl_hf.torture.command`."""

from __future__ import annotations

from flodl_hf.torture.command import main

if __name__ == "__main__":
    raise SystemExit(main())
