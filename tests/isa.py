"""Run the tests of arithmetic with the kernels of other processors: `make test-isa`.

torch and oneDNN choose their kernels by what the processor has, and can be told to do without. Each line below is
such a choice with a number of threads; those that this processor lacks are left out and named. ``--few`` takes two of
them: the plainest kernels on one thread, and those of nearly every processor on two.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch

# What computes: everything else gives the same on any processor.
TESTS = (
    "tests/flodl_hf/parity/test_golden.py",
    "tests/flodl_hf/decode/test_qa_as_4_57.py",
    "tests/flodl_hf/core/test_predict.py",
    "tests/flodl_hf/core/test_prediction_speed.py",
    "tests/flodl_hf/runtime/test_cpu.py",
    "tests/flodl_hf/runtime/test_cpu_prepared.py",
    "tests/flodl_hf/runtime/test_cpu_attention.py",
    "tests/flodl_hf/backends/test_one_layer.py",
)
# With two threads fewer: what threads change is in which order a product adds.
THREADED = TESTS[:1] + TESTS[3:4]
# ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA, threads.
CHOICES = (
    ("default", "SSE41", 1),
    ("avx2", "AVX2", 1),
    ("avx2", "AVX2", 2),
    ("avx512", "AVX512_CORE", 1),
    ("avx512", "DEFAULT", 2),
)
FEW = (CHOICES[0], CHOICES[2])
ORDER = ("default", "avx2", "avx512")


def run(choice: tuple[str, str, int]) -> tuple[int, str]:
    """Run the tests by one choice; return whether one failed, and what was printed."""
    capability, onednn, threads = choice
    settings = {"ATEN_CPU_CAPABILITY": capability, "ONEDNN_MAX_CPU_ISA": onednn, "OMP_NUM_THREADS": str(threads)}
    tests = THREADED if threads > 1 else TESTS
    more = [argument for argument in sys.argv[1:] if argument != "--few"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not slow and not gpu", *tests, *more]
    started = time.monotonic()
    told = subprocess.run(
        command,
        env={**os.environ, **settings},
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said = " ".join(f"{name}={value}" for name, value in settings.items())
    ended = f"--- {'failed' if told.returncode else 'passed'} in {time.monotonic() - started:.0f} s: {said}"
    return told.returncode, f"--- {said}\n{told.stdout}{ended}"


def main() -> int:
    """Run every choice, ``JOBS`` (2) at a time; return how many had a failing test."""
    here = torch.backends.cpu.get_cpu_capability().lower()
    known = ORDER.index(here) if here in ORDER else 0
    choices = FEW if "--few" in sys.argv else CHOICES
    for capability in {choice[0]: None for choice in choices if ORDER.index(choice[0]) > known}:
        print(f"--- ATEN_CPU_CAPABILITY={capability}: left out, this processor has none", flush=True)
    failed = 0
    with ThreadPoolExecutor(int(os.environ.get("JOBS", "2"))) as pool:
        for code, said in pool.map(run, [choice for choice in choices if ORDER.index(choice[0]) <= known]):
            failed += code != 0
            print(said, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
