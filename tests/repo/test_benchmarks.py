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
