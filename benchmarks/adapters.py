"""Training an adapter beside training all weights: steps a second, memory, checkpoints; and peft's where installed.

    python -m benchmarks.adapters [--batches 16 64] [--rank 8] [--steps 60] [--rounds 3] [--json FILE]
    python -m benchmarks.adapters --only full lora peft --batches 16 --rounds 1 --steps 20       # a minute
    python -m benchmarks.adapters --tiny           # does the script work? on a processor, small

BERT-base at random, made-up texts of log-normal lengths (median 40 words, at most 120), two classes, AdamW. On CUDA in
bf16. Ways are run in turn, so that a busy machine shows in all of them; the best round of each is told.

* ``full``: `finetune` of all weights; ``lora`` and ``lora all-linear``: with ``lora=RANK``.
* ``peft``: transformers' model with the same adapter by peft, in a plain loop under autocast, padded to the longest.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from flodl.train import StepDone
from flodl_hf import finetune
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.heads.auto import AutoModelForSequenceClassification
from flodl_hf.models.adapters import Lora
from flodl_hf.training.demo import learn_vocabulary

BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="*", default=None)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="names of ways; all by default")
    parser.add_argument("--tiny", action="store_true", help="a small model on a processor")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available() and not args.tiny
    where = torch.cuda.get_device_name() if cuda else "a processor"
    print(f"{where}, torch {torch.__version__}, rank {args.rank}, {'bf16' if cuda else 'fp32'}", flush=True)
    found = []
    with tempfile.TemporaryDirectory() as place:
        base = make_base(Path(place) / "base", tiny=args.tiny)
        steps = 4 if args.tiny else args.steps
        for batch in args.batches or ([4] if args.tiny else [16, 64]):
            table = texts(batch * steps, longest=12 if args.tiny else 120)
            ways = ways_of(base, table, batch, steps, args.rank, cuda)
            ways = {name: run for name, run in ways.items() if args.only is None or name in args.only}
            best: dict[str, dict[str, float]] = {}
            for _ in range(1 if args.tiny else args.rounds):
                for name, run in ways.items():
                    row = run()
                    said = f"{row['steps_per_s']:8.1f} steps/s  peak {row['peak_mb']:8,.0f} MB"
                    print(f"batch {batch:>4}  {name:<16} {said}", flush=True)
                    if name not in best or row["steps_per_s"] > best[name]["steps_per_s"]:
                        best[name] = row
            for name, row in best.items():
                ratio = row["steps_per_s"] / best.get("full", row)["steps_per_s"]
                print(
                    f"batch {batch:>4}  {name:<16} {row['steps_per_s']:8.1f} steps/s ({ratio:4.2f}x)  "
                    f"peak {row['peak_mb']:8,.0f} MB  kept {row['kept_mb']:7,.1f} MB",
                    flush=True,
                )
                found.append({"batch": batch, "way": name, **row})
    if args.json:
        args.json.write_text(json.dumps({"device": where, "torch": torch.__version__, "rows": found}, indent=1) + "\n")


def make_base(folder: Path, *, tiny: bool) -> Path:
    """Write a BERT with random weights."""
    tokenizer = learn_vocabulary()
    sizes = TINY if tiny else BASE
    config = ModelConfig.for_model(
        "bert", vocab_size=tokenizer.vocab_size, max_position_embeddings=256, type_vocab_size=2, labels=["a", "b"],
        problem_type="single_label_classification", **sizes,
    )  # fmt: skip
    model: Any = AutoModelForSequenceClassification.from_config(config)
    model.tokenizer = tokenizer
    return model.save_pretrained(folder)


def texts(count: int, longest: int) -> list[dict[str, Any]]:
    """Return rows of made-up words."""
    draw = random.Random(0)
    words = ["good", "bad", "film", "book", "slow", "fast", "the", "a", "and", "was", "never", "always"]
    rows = []
    for i in range(count):
        length = min(longest, max(3, int(draw.lognormvariate(3.7, 0.5))))
        rows.append({"text": " ".join(draw.choice(words) for _ in range(length)), "label": "ab"[i % 2]})
    return rows


def ways_of(
    base: Path, table: list[dict[str, Any]], batch: int, steps: int, rank: int, cuda: bool
) -> dict[str, Callable[[], dict[str, float]]]:
    """Return what is compared, by name."""

    def ours(**options: Any) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            times: list[float] = []

            def note(event: Any) -> None:
                if isinstance(event, StepDone):
                    times.append(time.perf_counter())

            clear(cuda)
            with tempfile.TemporaryDirectory() as place:
                # The first epoch records shapes; the second is timed.
                result = finetune(
                    base, train=table, out=Path(place) / "out", epochs=2, batch_size=batch, report=False,
                    precision="bf16" if cuda else "fp32", on_event=note, progress=False, **options,
                )  # fmt: skip
                if result.recorded is not None:
                    print(f"    {result.recorded}", flush=True)
                assert result.folder is not None
                kept = sum(path.stat().st_size for path in result.folder.glob("*.safetensors"))
            return told((len(times) - steps - 1) / (times[-1] - times[steps]), cuda, kept)

        return run

    ways = {"full": ours(), "lora": ours(lora=rank), "lora all-linear": ours(adapter=Lora(rank, targets="all-linear"))}
    if find_spec("peft") is not None and find_spec("transformers") is not None:
        ways["peft"] = lambda: of_peft(base, table, batch, steps, rank, cuda)
    return ways


def of_peft(base: Path, table: list[dict[str, Any]], batch: int, steps: int, rank: int, cuda: bool) -> dict[str, float]:
    """Return what peft does in a plain loop."""
    import peft  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForSequenceClassification as Theirs

    from flodl_hf import AutoTokenizer

    clear(cuda)
    device = torch.device("cuda" if cuda else "cpu")
    settings = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=["query", "value"], task_type="SEQ_CLS")
    model: Any = peft.get_peft_model(Theirs.from_pretrained(base, dtype=torch.float32), settings).to(device).train()
    rates = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 5e-5, fused=cuda)
    tokenizer = AutoTokenizer.from_pretrained(base)
    batches = []
    for at in range(0, len(table), batch):
        rows = table[at : at + batch]
        encoded = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
        labels = torch.tensor(["ab".index(row["label"]) for row in rows])
        batches.append({**{k: v.to(device) for k, v in dict(encoded).items()}, "labels": labels.to(device)})
    began = 0.0
    for _ in range(2):
        began = time.perf_counter()
        for given in batches:
            with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                loss = model(**given).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            rates.step()
            rates.zero_grad()
        if cuda:
            torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    kept = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return told(steps / seconds, cuda, kept)


def clear(cuda: bool) -> None:
    """Begin with an empty device: what went before is in cycles that hold recorded steps."""
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def told(rate: float, cuda: bool, kept: float) -> dict[str, float]:
    """Return a row: steps a second, the most memory on the device, what is written."""
    peak = torch.cuda.max_memory_allocated() / 1e6 if cuda else 0.0
    return {"steps_per_s": rate, "peak_mb": peak, "kept_mb": kept / 1e6}


if __name__ == "__main__":
    main()
