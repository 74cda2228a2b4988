"""Run the quick tests in processes that share the files: `make test`.

Every process collects all tests and takes the next file that nobody has taken; of two, one begins with the first file
and one in the middle. So files that need the same fixtures stay together, the last file is the most that one waits for
another, and no word passes between processes for each of many thousand tests. ``JOBS`` (2) says how many there are.
Arguments are those of pytest:

    make test
    JOBS=1 .venv/bin/python -m tests.quick tests/flodl
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PYTEST = (sys.executable, "-m", "pytest", "-p", "tests.quick", "-p", "no:cacheprovider", "-n", "0", "-q")
CHOSEN = ("-m", "not slow and not gpu", "--durations=25", "--durations-min=4")
# Where files that were taken are marked, and which of how many processes this one is.
TAKEN, PLACE, OF = "TESTS_TAKEN", "TESTS_PLACE", "TESTS_OF"


def order(files: list[Path], place: int, of: int) -> list[Path]:
    """Return files as one of several processes looks for its next one: all of them, from another place each."""
    start = place * len(files) // of
    return [*files[start:], *files[:start]]


def taken(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the tests of files that this process is the first to take."""
    by_file: dict[Path, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.path, []).append(item)
    files = list(by_file)
    for file in order(files, int(os.environ[PLACE]), int(os.environ[OF])):
        try:
            (Path(os.environ[TAKEN]) / str(files.index(file))).touch(exist_ok=False)
        except FileExistsError:
            continue
        yield from by_file[file]


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests that fall to this process; pytest itself says what it does where tests cannot be collected."""
    if session.testsfailed or session.config.option.collectonly:
        return None
    items = taken(session.items)
    item = next(items, None)
    while item is not None:
        # Fixtures that the next test needs stay, so it is known before this one runs.
        following = next(items, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True


def main() -> int:
    """Run all processes; return 1 where a test failed or a process ended otherwise."""
    jobs, begun = int(os.environ.get("JOBS", "2")), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        marks = Path(folder) / "taken"
        marks.mkdir()
        outputs = [Path(folder) / f"output {place}" for place in range(1, jobs)]
        running: list[subprocess.Popen[bytes]] = []
        for place in range(jobs):
            env = {**os.environ, TAKEN: str(marks), PLACE: str(place), OF: str(jobs)}
            # Hundreds of tests start a program. Without compiled files each of them compiles all modules again.
            env.pop("PYTHONDONTWRITEBYTECODE", None)
            # The first one is seen while it runs; what the others print follows.
            out = outputs[place - 1].open("wb") if place else None
            running.append(subprocess.Popen([*PYTEST, *CHOSEN, *sys.argv[1:]], env=env, stdout=out, stderr=out))
            if out is not None:
                out.close()
        codes = [process.wait() for process in running]
        for output in outputs:
            sys.stdout.write(output.read_text("utf-8", "replace"))
    print(f"{jobs} processes ended with {codes} after {time.monotonic() - begun:.0f} s", flush=True)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
