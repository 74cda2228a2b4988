"""`python -m benchmarks` lists programs, and no modules that they share."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("benchmarks")

from benchmarks.__main__ import main, names

ROOT = Path(__file__).parents[2]


def test_the_list_contains_programs_and_no_helpers():
    found = names()
    assert {"ddp", "peers", "graph_overhead", "train_step", "cpu"} <= set(found)
    assert not {"corpus", "models", "serving_clients", "vector_peers", "on_cpu"} & set(found)


@pytest.mark.parametrize("name", ["corpus", "nothing"])
def test_a_name_that_is_not_a_program_is_refused(name):
    with pytest.raises(SystemExit, match="graph_overhead"):
        main([name])


def test_a_benchmark_that_is_a_package_runs():
    code = "import sys; sys.modules['torch'] = None; from benchmarks.__main__ import main; main(['ddp'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    # Without torch the program starts and fails at its imports, which shows that it is found.
    assert "== ddp" in done.stdout
    assert "import of torch halted" in done.stderr


def test_every_benchmark_starts():
    code = """
import contextlib, io, runpy, sys
from benchmarks.__main__ import names
for name in ("__main__", *names()):
    sys.argv, output = [name, "--help"], io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
        print(name, "has no --help")
    except SystemExit as end:
        if end.code or "usage: " not in output.getvalue():
            print(name, "returned", end.code)
    except Exception as error:
        print(name, repr(error))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-2000:]
