"""Loading a checkpoint: seconds and peak memory, ours beside transformers, each in fresh processes.

The contenders are interleaved and every run is a new interpreter, because what is measured includes
the imports' leftovers and the allocator's state. "load" starts with the library imported; "from start"
counts its import too. Peak memory is the growth of the process's largest resident set (VmHWM, reset
before loading; Linux) until every weight has been read once.

    python -m benchmarks.loading            # a bert-base file is made in a temporary folder
    python -m benchmarks.loading FOLDER --rounds 5 --json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

OURS = "import flodl_hf, flodl_hf.models.pretrained; load = lambda f: flodl_hf.AutoModel.from_pretrained(f, mapped={})"
CONTENDERS = {
    "flodl_hf, copied": OURS.format(False),
    "flodl_hf, mapped": OURS.format(True),
    "transformers": (
        "import transformers; transformers.logging.set_verbosity_error(); "
        "transformers.utils.logging.disable_progress_bar(); load = transformers.BertModel.from_pretrained"
    ),
}
RUN = """
import json, time
import torch
begun = time.perf_counter()
{setup}
def status(key):
    line = next(l for l in open("/proc/self/status") if l.startswith(key))
    return int(line.split()[1]) / 1024
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
start = time.perf_counter()
model = load({folder!r})
loaded = time.perf_counter()
with torch.no_grad():
    total = sum(float(p.sum()) for p in model.parameters())  # every weight read once
touched = time.perf_counter()
print(json.dumps({{
    "load_s": loaded - start, "read_s": touched - start, "from_start_s": loaded - begun,
    "peak_mb": status("VmHWM") - before, "sum": total,
}}))
"""
FIGURES = ("load_s", "read_s", "from_start_s", "peak_mb")


def make_bert_base(folder: Path) -> Path:
    from flodl_hf.parity.reference import make_checkpoint

    return make_checkpoint(folder, "BertModel", {})


def measure(folder: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    results: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, setup in CONTENDERS.items():
            code = RUN.format(setup=setup, folder=str(folder))
            out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
            results[name].append(json.loads(out.splitlines()[-1]))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="a BERT folder; made on the spot if not given")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as room:
        folder = options.folder or make_bert_base(Path(room) / "bert-base")
        size = sum(p.stat().st_size for p in folder.glob("*.safetensors")) / 2**20
        results = measure(folder, options.rounds)
    summary = {name: {key: median(run[key] for run in runs) for key in FIGURES} for name, runs in results.items()}
    if options.json:
        print(json.dumps({"file_mb": size, "rounds": options.rounds, "median": summary}, indent=2))
        return
    print(f"weights: {size:.0f} MB, medians of {options.rounds} interleaved rounds, fresh processes")
    print(f"{'':<20}{'load s':>9}{'+ all read':>12}{'from start':>12}{'peak MB':>9}{'x file':>8}{'load x theirs':>15}")
    theirs = summary["transformers"]
    for name, row in summary.items():
        print(
            f"{name:<20}{row['load_s']:>9.3f}{row['read_s']:>12.3f}{row['from_start_s']:>12.2f}{row['peak_mb']:>9.0f}"
            f"{row['peak_mb'] / size:>8.2f}{row['load_s'] / theirs['load_s']:>15.2f}"
        )


if __name__ == "__main__":
    main()
