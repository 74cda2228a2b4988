"""The suites by name, in the order in which they run, and how many cases each has when it is run in full."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["DEFAULT_CASES", "SUITES"]

DEFAULT_CASES: Mapping[str, int] = {
    "config": 20_000,
    "tokenizer": 12_000,
    "sentence": 5_000,
    "hub": 2_000,
    "texts": 6_000,
    "bulk": 2_000,
    "interrupts": 6_000,
    "serve": 4_000,
}

SUITES = tuple(DEFAULT_CASES)
"""Each is the module of that name in this package."""
