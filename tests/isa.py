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

import torch

# What computes: everything else gives the same on any processor.
TESTS = (
    "tests/flodl_hf/parity/test_golden.py",
    "tests/flodl_hf/decode/test_qa_as_4_57.py",
    "tests/flodl_hf/core/test_predict.py",
    "tests/flodl_hf/core/test_prediction_speed.py",
    "tests/flodl_hf/runtime/test_cpu.py",
    "tests/flodl_hf/runtime/test_cpu_prepared.py",
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


def main() -> int:
    """Run every choice; return how many had a failing test."""
    here = torch.backends.cpu.get_cpu_capability().lower()
    known = ORDER.index(here) if here in ORDER else 0
    failed = 0
    more = [argument for argument in sys.argv[1:] if argument != "--few"]
    for capability, onednn, threads in FEW if "--few" in sys.argv else CHOICES:
        name = f"ATEN_CPU_CAPABILITY={capability} ONEDNN_MAX_CPU_ISA={onednn} OMP_NUM_THREADS={threads}"
        if ORDER.index(capability) > known:
            print(f"--- {name}: left out, this processor has no {capability}", flush=True)
            continue
        print(f"--- {name}", flush=True)
        started = time.monotonic()
        settings = {
            "ATEN_CPU_CAPABILITY": capability,
            "ONEDNN_MAX_CPU_ISA": onednn,
            "OMP_NUM_THREADS": str(threads),
        }
        # Two processes of one thread each, or one of two.
        jobs = ["-n", "0" if threads > 1 else os.environ.get("JOBS", "2")]
        tests = THREADED if threads > 1 else TESTS
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not gpu", *jobs, *tests, *more]
        code = subprocess.run(command, env={**os.environ, **settings}, check=False).returncode
        failed += code != 0
        print(f"--- {'failed' if code else 'passed'} in {time.monotonic() - started:.0f} s: {name}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
