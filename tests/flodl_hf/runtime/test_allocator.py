"""The C library keeps memory where it can and where nobody said otherwise."""

from __future__ import annotations

import ctypes
import sys

import pytest

from flodl_hf.runtime import allocator

glibc = sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Forget what was decided, and note what is set instead of setting it."""
    for name in allocator._ASKED:
        monkeypatch.delenv(name, raising=False)
    told: list[tuple[int, int]] = []

    class Library:
        gnu_get_libc_version = True

        def mallopt(self, name: int, value: int) -> int:
            told.append((name, value))
            return 1

    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: Library())
    monkeypatch.setattr(allocator, "keep_memory", allocator.cache(allocator.keep_memory.__wrapped__))
    return told


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
def test_memory_is_kept_once(anew: list[tuple[int, int]]) -> None:
    assert allocator.keep_memory()
    assert allocator.keep_memory()
    assert [name for name, _ in anew] == [-1, -2, -3]


@pytest.mark.parametrize("name", allocator._ASKED)
def test_what_the_environment_says_stays(
    name: str, anew: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    assert not allocator.keep_memory()
    assert anew == []


@pytest.mark.skipif(not glibc, reason="glibc's")
def test_glibc_takes_the_numbers() -> None:
    assert allocator.keep_memory() or any(name in allocator.os.environ for name in allocator._ASKED)
