"""Run the slow tests file by file, and go on where the last run ended: `make test-slow`.

Each file has a process of its own, whose output stands in ``build/slow``. A test that takes longer than ``LIMIT``
seconds (1200) ends its file, with the stack of every thread. Files that passed at this state of the checkout are left
out; ``--again`` runs them too. Arguments are files or folders to take from, and ``JOBS`` (1) files run at a time:

    make test-slow
    JOBS=2 LIMIT=3600 .venv/bin/python -m tests.slow tests/flodl tests/flodl_hf/finetune
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build" / "slow"
running: set[int] = set()
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow and not gpu")


def state() -> str:
    """Return a name of what is checked out, changes included, and of the Python that runs; empty without git."""
    found = b""
    for asked in (("rev-parse", "HEAD"), ("diff", "HEAD")):
        told = subprocess.run(["git", *asked], cwd=ROOT, capture_output=True, check=False)
        if told.returncode:
            return ""
        found += told.stdout
    return hashlib.sha256(found + sys.version.encode()).hexdigest()[:16]


def collected(places: list[str]) -> dict[str, int]:
    """Return the files that hold slow tests, with their number."""
    told = subprocess.run([*PYTEST, "--collect-only", *places], cwd=ROOT, capture_output=True, text=True, check=False)
    if told.returncode not in (0, 5):  # 5: no test at all
        sys.exit(told.stdout[-4000:] + told.stderr[-2000:])
    return dict(Counter(line.partition("::")[0] for line in told.stdout.splitlines() if "::" in line))


def end(group: int) -> None:
    """End what is left of a file's processes."""
    running.discard(group)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def run(file: str, limit: str) -> tuple[bool, str, float]:
    """Run one file; return whether it passed, pytest's last line, and seconds."""
    begun = time.monotonic()
    log = PLACE / f"{file.removesuffix('.py').replace('/', '-')}.txt"
    guard = ("-o", f"faulthandler_timeout={limit}", "-o", "faulthandler_exit_on_timeout=true")
    with log.open("w") as out:
        # A session of its own: what a file that ended early has started ends with it.
        process = subprocess.Popen(
            [*PYTEST, "--durations=10", *guard, file], cwd=ROOT, stdout=out, stderr=out, start_new_session=True
        )
        running.add(process.pid)
        code = process.wait()
        end(process.pid)
    counted = re.findall(r"^\d+ .* in [\d.]+s.*$", log.read_text(errors="replace"), re.MULTILINE)
    told = counted[-1] if counted else f"ended by {code}: a test took over {limit} s, or the process died"
    return code == 0, f"{told}, {log.relative_to(ROOT)}", time.monotonic() - begun


def main() -> int:
    """Run what has not passed yet; return how many files failed."""
    places = [argument for argument in sys.argv[1:] if argument != "--again"]
    now, kept = state(), PLACE / "passed.json"
    PLACE.mkdir(parents=True, exist_ok=True)
    before = json.loads(kept.read_text()) if kept.exists() and "--again" not in sys.argv else {}
    passed = set(before["files"]) if now and before.get("state") == now else set()
    files = collected(places)
    left = [file for file in files if file not in passed]
    print(f"{sum(files.values())} slow tests in {len(files)} files, {len(files) - len(left)} of which passed before")
    failed = []
    with ThreadPoolExecutor(int(os.environ.get("JOBS", "1"))) as pool:
        jobs = {pool.submit(run, file, os.environ.get("LIMIT", "1200")): file for file in left}
        try:
            for job in as_completed(jobs):
                file, (good, told, seconds) = jobs[job], job.result()
                print(f"{'passed' if good else 'FAILED'} {seconds:6.0f} s  {file}: {told}", flush=True)
                if good:
                    passed.add(file)
                    kept.write_text(json.dumps({"state": now, "files": sorted(passed)}, indent=1))
                else:
                    failed.append(file)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for group in list(running):
                end(group)
            return 130
    print(f"{len(left) - len(failed)} of {len(left)} files passed" + "".join(f"\nfailed: {file}" for file in failed))
    return min(len(failed), 1)


if __name__ == "__main__":
    sys.exit(main())
