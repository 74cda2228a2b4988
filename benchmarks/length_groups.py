"""Does putting rows of similar length together cost quality, or make a run collapse?

The same short recipe over several seeds, once with `group_by_length` and once without, judged on held-out rows. The
start is cut down to its first layers, so that many seeds fit into little time: what is compared is the order of rows.
Pairs of runs are done seed by seed, so a run that is ended early leaves whole pairs.

    python benchmarks/length_groups.py --model DIR --data DIR --seeds 10
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from flodl_hf import AutoModel
from flodl_hf.tokenization.readers import load_rows
from flodl_hf.training import finetune

TASKS: dict[str, dict[str, Any]] = {
    "wnut17": {
        "train": "wnut17/train.conll", "dev": "wnut17/dev.conll", "figure": "f1", "collapsed": 0.05,
        "rows": 1000, "recipe": {"epochs": 3, "lr": 5e-4},
    },
    "sst2": {
        "train": "sst2/train.tsv", "dev": "sst2/dev.tsv", "figure": "accuracy", "collapsed": 0.6,
        "rows": 500, "recipe": {"epochs": 2, "lr": 5e-4},
    },
    # Answers of so short a run are poor; what is looked for are runs that learn nothing at all.
    "xquad": {
        "train": "xquad/train.json", "dev": "xquad/dev.json", "figure": "f1", "collapsed": 1.0,
        "rows": 128, "recipe": {"epochs": 2, "lr": 5e-4, "max_length": 128, "stride": 32},
    },
}  # fmt: skip


def shortened(model: str, layers: int, folder: Path) -> Path:
    """Return a folder with the first layers of ``model``."""
    AutoModel.from_pretrained(model, dtype=torch.float32).save_pretrained(folder / "whole")
    config = json.loads((folder / "whole" / "config.json").read_text())
    config["num_hidden_layers"] = layers
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "whole" / "model.safetensors")
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if ".layer." not in f".{name}" or int(name.split("layer.")[1].split(".")[0]) < layers
    }
    cut = folder / "cut"
    cut.mkdir()
    for path in (folder / "whole").iterdir():
        if (path.is_file() and "token" in path.name) or path.name == "vocab.txt":
            (cut / path.name).write_bytes(path.read_bytes())
    (cut / "config.json").write_text(json.dumps(config))
    save_file(kept, cut / "model.safetensors", {"format": "pt"})
    return cut


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(TASKS), choices=list(TASKS), metavar="TASK")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--held-out", type=int, default=300, help="rows of the held-out data")
    parser.add_argument("--minutes", type=float, help="begin no further pair of runs after so long")
    parser.add_argument("--json", type=Path)
    said = parser.parse_args()
    found: dict[tuple[str, bool], list[float]] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        start = shortened(said.model, said.layers, Path(folder))
        for name, task in ((name, TASKS[name]) for name in said.only):
            for seed in range(1, said.seeds + 1):
                if said.minutes and time.monotonic() - began > 60 * said.minutes:
                    continue
                train = load_rows(said.data / task["train"])[: task["rows"]]
                dev = load_rows(said.data / task["dev"])[: said.held_out]
                line = []
                for grouped in (True, False):
                    result = finetune(
                        start, train=train, eval=dev, seed=seed, group_by_length=grouped, keep_best=False,
                        eval_every=None, layout="padded", devices="cpu", batch_size=32, **task["recipe"],
                    )  # fmt: skip
                    figure = result.metrics[task["figure"]]
                    found.setdefault((name, grouped), []).append(figure)
                    line.append(f"{'grouped' if grouped else 'mixed'} {figure:.4f} in {result.seconds:.0f} s")
                print(f"{name:7} seed {seed}: {task['figure']} {'  '.join(line)}", flush=True)
                if said.json:
                    said.json.write_text(json.dumps({f"{n} {g}": v for (n, g), v in found.items()}, indent=1))
    for (name, grouped), values in found.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        lost = sum(value < TASKS[name]["collapsed"] for value in values)
        print(
            f"{name:7} {'grouped' if grouped else 'mixed  '} mean {statistics.mean(values):.4f}  deviation {spread:.4f}"
            f"  least {min(values):.4f}  collapsed {lost} of {len(values)}"
        )
    print(f"torch {torch.__version__}, python {platform.python_version()}")


if __name__ == "__main__":
    main()
