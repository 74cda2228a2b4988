"""One recipe, several seeds, two loops: is a model that `finetune` trains as good as one of a plain loop?

Both loops get the same rows, the same batches, the same start and the model's own dropout. The plain loop is
transformers' model, torch's AdamW, transformers' schedule. Every folder that `finetune` writes is then read by
transformers, verified, and judged again on the scores that transformers computes. Data are folders as in `--data`:
sst2/{train,dev}.tsv, wnut17/{train,dev}.conll, xquad/{train,dev}.json.

    python benchmarks/finetune_quality.py --model DIR --data DIR --device cuda
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from finetune_parity import load_reference, plain_loop

from flodl_hf import AutoModel
from flodl_hf.export.verify import verify_export
from flodl_hf.training import finetune
from flodl_hf.training.job import plan_job
from flodl_hf.training.options import make_options

TASKS: dict[str, dict[str, Any]] = {
    "sst2": {
        "train": "sst2/train.tsv", "dev": "sst2/dev.tsv", "figure": "accuracy",
        "recipe": {"epochs": 3, "lr": 5e-5, "batch_size": 32, "warmup": 0.06, "weight_decay": 0.01},
    },
    "wnut17": {
        "train": "wnut17/train.conll", "dev": "wnut17/dev.conll", "figure": "f1",
        "recipe": {"epochs": 5, "lr": 1e-4, "batch_size": 16, "warmup": 0.06, "weight_decay": 0.01},
    },
    "xquad": {
        "train": "xquad/train.json", "dev": "xquad/dev.json", "figure": "f1",
        "recipe": {"epochs": 8, "lr": 2e-4, "batch_size": 16, "warmup": 0.06, "weight_decay": 0.01},
    },
}  # fmt: skip


class Judged:
    """transformers' model behind the two names by which `Evaluation` asks for scores."""

    def __init__(self, model: Any, device: str) -> None:
        self.model = model.to(device).eval()
        self.device = torch.device(device)

    def _run_graph(self, ids: Any, mask: Any, types: Any, positions: Any, outputs: Any = None) -> tuple[Any]:
        given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        out = self.model(**given, **({} if types is None else {"token_type_ids": types}))
        if "start_logits" in out:
            return (torch.stack([out.start_logits, out.end_logits], dim=-1),)
        return (out.logits,)


def one_seed(task: str, seed: int, model: str, data: Path, device: str, cut: int | None) -> dict[str, Any]:
    """Return the figures of both loops, and of the written folder as transformers reads it."""
    told = TASKS[task]
    options: dict[str, Any] = {**told["recipe"], "seed": seed, "keep_best": False, "devices": device}
    if cut:
        options["max_steps"] = cut
    train, dev = data / told["train"], data / told["dev"]
    job = plan_job(model, train, dev, make_options(options))
    assert job.evaluation is not None
    with tempfile.TemporaryDirectory() as folder:
        start, out = Path(folder) / "start", Path(folder) / "out"
        job.model.save_pretrained(start)
        reference = load_reference(start, job, dropout=True).to(device)
        torch.manual_seed(seed)
        began = time.perf_counter()
        theirs_losses = plain_loop(reference, job)
        theirs_seconds = time.perf_counter() - began
        theirs = job.evaluation(Judged(reference, device))
        result = finetune(model, train=train, eval=dev, out=out, **options)
        receipt = verify_export(out)
        again = job.evaluation(Judged(load_reference(out, job), device))
    figure = told["figure"]
    return {
        "task": task, "seed": seed, "figure": figure, "steps": result.steps,
        "ours": result.metrics, "plain": theirs, "folder_in_transformers": again,
        "first_loss": [result.losses[0], theirs_losses[0]], "last_losses": [
            statistics.mean(result.losses[-20:]), statistics.mean(theirs_losses[-20:])
        ],
        "seconds": [result.seconds, theirs_seconds],
        "verified": receipt.passed if hasattr(receipt, "passed") else str(receipt),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or Hub name of the start")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-steps", type=int, help="cut every run short, to try the script")
    parser.add_argument("--json", type=Path)
    said = parser.parse_args()
    rows = []
    start = Path(tempfile.mkdtemp()) / "start"
    AutoModel.from_pretrained(said.model, dtype=torch.float32).save_pretrained(start)
    for task in said.tasks:
        for seed in said.seeds:
            row = one_seed(task, seed, str(start), said.data, said.device, said.max_steps)
            rows.append(row)
            f = row["figure"]
            print(
                f"{task:7} seed {seed}: {f} ours {row['ours'][f]:.4f}  plain loop {row['plain'][f]:.4f}  "
                f"folder read by transformers {row['folder_in_transformers'][f]:.4f}  verified {row['verified']}  "
                f"seconds {row['seconds'][0]:.1f} / {row['seconds'][1]:.1f}  last losses "
                f"{row['last_losses'][0]:.4f} / {row['last_losses'][1]:.4f}",
                flush=True,
            )
            if said.json:
                said.json.write_text(json.dumps(rows, indent=1))
    for task in said.tasks:
        f = TASKS[task]["figure"]
        for side in ("ours", "plain"):
            values = [row[side][f] for row in rows if row["task"] == task]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            print(f"{task:7} {side:6} {f} mean {statistics.mean(values):.4f}  deviation {spread:.4f}")
    print(f"torch {torch.__version__}, python {platform.python_version()}, {said.device}")


if __name__ == "__main__":
    main()
