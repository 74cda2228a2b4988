"""Fine-tuning steps of BERT-base in bf16 autocast with float32 weights: transformers, by hand, and ours.

    python -m benchmarks.train_step --tokenizer FOLDER --text FILE [--rounds 3] [--compile] [--json FILE]

Texts are runs of real English words out of ``--text``, their lengths log-normal with median 22, cut at 128
tokens; two classes at random; weights at random at the real size, since neither changes the speed. Contenders:

* trainer: transformers' ``Trainer`` with its defaults, batch 32, padded to the longest of a batch;
* by hand: transformers' model on full 32 x 128 rows, fused AdamW, clipping, no read of the loss;
* ours: ``finetune(precision="bf16", batch_size=32)``, whose rows are packed into buckets and whose steps are
  recorded; with ``--compile`` once more translated by ``torch.compile``;
* ours, 32k tokens: the same with ``tokens_per_batch=32768``.

Rounds go through the contenders in turn, between our epochs. Speed is the median over rounds; memory the most
that was allocated in a contender's turn beyond what the others hold. The share of the peak counts 6 x 85 million
operations for a real token, over an 8192³ bf16 product's speed measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.graph_overhead import scaled_mad
from flodl.train import EpochMetrics, StepDone, Warned
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.heads.sequence_classification import SequenceClassifier as Ours
from flodl_hf.tokenization.tokenizer import Tokenizer
from flodl_hf.training import finetune

LENGTH, BATCH, BUDGET = 128, 32, 32768
DENSE = 6 * 85e6  # operations of a training step for one token: forward 2, backward 4, for each dense weight
SIZE: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
TINY: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
CUDA = torch.cuda.is_available()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, type=Path)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=48, help="steps of an epoch of ours")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", default="peers,mixed,large", help="parts to run, separated by commas")
    parser.add_argument("--tiny", action="store_true", help="a small model, to see that everything works")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    parts = args.only.split(",")
    texts = make_texts(args.text, args.steps * BATCH)
    tokenizer = Tokenizer.from_pretrained(args.tokenizer)
    peak = matmul_peak() if CUDA else float("nan")
    table: list[dict[str, Any]] = []
    peers = Peers(texts, args.tokenizer, TINY if args.tiny else SIZE) if "peers" in parts else None
    size = TINY if args.tiny else SIZE
    for compiled in (False, True) if args.compile else (False,):
        name = "ours, compiled" if compiled else "ours"
        if "mixed" in parts:
            found = ours(name, texts, tokenizer, size, args.rounds, peers if not compiled else None, compile=compiled)
            table += found
            show(found, peak)
        if "large" in parts:
            many = texts * max(1, round(8 * BUDGET / (32 * len(texts))))
            found = ours(
                f"{name}, 32k tokens", many, tokenizer, size, args.rounds, None, compile=compiled,
                tokens_per_batch=BUDGET if not args.tiny else 512,
            )  # fmt: skip
            table += found
            show(found, peak)
    print(f"\n{'contender':<24} {'steps/s':>9} {'sigma':>7} {'ktok/s':>8} {'% of peak':>9} {'peak MB':>8}")
    show(table, peak)
    where = torch.cuda.get_device_name() if CUDA else platform.processor()
    print(f"{where}, torch {torch.__version__}, bf16 product at {peak / 1e12:.0f} TFLOP/s")
    if args.json:
        args.json.write_text(
            json.dumps({"device": where, "torch": torch.__version__, "peak": peak, "rows": table}) + "\n"
        )
    return 0


def show(rows: list[dict[str, Any]], peak: float) -> None:
    """Print rows of the table."""
    for row in rows:
        share = row["tokens_s"] * DENSE / peak
        print(
            f"{row['name']:<24} {row['steps_s']:>9.1f} {row['sigma']:>7.2%} {row['tokens_s'] / 1e3:>8.0f} "
            f"{share:>9.1%} {row['peak_mb']:>8.0f} {row.get('said', '')}",
            flush=True,
        )


def make_texts(source: Path, count: int) -> list[str]:
    """Return so many runs of words, of log-normal length with median 22."""
    lines = source.read_text(encoding="utf-8").splitlines()
    words = [word for line in lines for word in line.split("\t")[0].split()]
    rng = np.random.default_rng(0)
    found = []
    for length in np.clip(np.exp(rng.normal(np.log(22), 0.75, count)), 1, 120).astype(int):
        start = int(rng.integers(0, len(words) - int(length)))
        found.append(" ".join(words[start : start + int(length)]))
    return found


def matmul_peak() -> float:
    """Return the operations a second of an 8192³ bf16 product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        start = perf_counter()
        torch.matmul(a, b)
        torch.cuda.synchronize()
        times.append(perf_counter() - start)
    return 2 * 8192**3 / median(times)


def ours(
    name: str, texts: list[str], tokenizer: Any, size: dict[str, Any], rounds: int, peers: Peers | None, **options: Any
) -> list[dict[str, Any]]:
    """Return the rows of a run of ours, and of the peers that took turns with it."""
    with tempfile.TemporaryDirectory() as folder:
        config = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "vocab_size": 30522}
        config |= {"max_position_embeddings": 512, "type_vocab_size": 2, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}}
        (Path(folder) / "config.json").write_text(json.dumps({**config, **size}))
        torch.manual_seed(0)
        model = Ours.from_config(ModelConfig.from_pretrained(folder))
    model.tokenizer = tokenizer
    rng = random.Random(0)
    rows = [{"text": text, "label": f"LABEL_{rng.randrange(2)}"} for text in texts]
    lengths = [min(LENGTH, len(tokenizer.encode(text))) for text in texts]
    speeds: list[float] = []
    shapes: list[float] = []
    said: list[str] = []
    warm = 2
    held = [torch.cuda.memory_allocated() if CUDA else 0, 0]
    steps = [0]

    def note(event: Any) -> None:
        if isinstance(event, StepDone):
            steps[0] += 1
            shapes.append(event.loss)
        elif isinstance(event, Warned):
            said.append(event.message)
        elif isinstance(event, EpochMetrics):
            if CUDA:
                held[1] = max(held[1], torch.cuda.max_memory_allocated() - held[0])
            if event.epoch >= warm:
                speeds.append(steps[0] / event.epoch_ms * 1e3)
                if peers is not None:
                    peers.turn()
            if CUDA:
                torch.cuda.reset_peak_memory_stats()
            steps[0] = 0

    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    finetune(
        model, train=rows, on_event=note, epochs=warm + rounds, batch_size=BATCH, max_length=LENGTH, lr=2e-5,
        precision="bf16" if CUDA else "fp32", **options,
    )  # fmt: skip
    per_epoch = len(shapes) / (warm + rounds)
    row = {
        "name": name, "steps_s": median(speeds), "sigma": scaled_mad(speeds) / median(speeds),
        "tokens_s": median(speeds) * sum(lengths) / per_epoch, "peak_mb": held[1] / 2**20, "said": "; ".join(said),
    }  # fmt: skip
    return [*(peers.rows() if peers is not None else []), row]


class Peers:
    """transformers' Trainer, and a loop by hand over its model."""

    def __init__(self, texts: list[str], folder: Path, size: dict[str, Any]) -> None:
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        config = transformers.BertConfig(vocab_size=30522, **size)
        encoded = tokenizer(texts, truncation=True, max_length=LENGTH)["input_ids"]
        rng = random.Random(0)
        self.data = [{"input_ids": ids, "label": rng.randrange(2)} for ids in encoded]
        self.real = sum(map(len, encoded)) / len(encoded) * BATCH
        self.calls: dict[str, tuple[Callable[[int], float], float, int]] = {}
        self.speeds: dict[str, list[float]] = {}
        self.peaks: dict[str, int] = {}
        for name, make, steps in (("trainer", self._trainer, 16), ("by hand, 32 x 128", self._by_hand, 24)):
            before = torch.cuda.memory_allocated() if CUDA else 0
            try:
                call, tokens = make(transformers, tokenizer, config)
                call(4)
            except Exception as error:
                print(f"{name}: left out, {type(error).__name__}: {error}", flush=True)
                continue
            self.calls[name] = call, tokens, steps if CUDA else 4
            self.speeds[name], self.peaks[name] = [], (torch.cuda.memory_allocated() if CUDA else 0) - before

    def _trainer(self, transformers: Any, tokenizer: Any, config: Any) -> tuple[Callable[[int], float], float]:
        model = transformers.BertForSequenceClassification(config)
        folder = tempfile.mkdtemp()

        class Clock(transformers.TrainerCallback):
            """When steps ended; what comes before the second one is setting up."""

            def __init__(self) -> None:
                self.ends: list[float] = []

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                if len(self.ends) == 1 and CUDA:
                    torch.cuda.synchronize()
                self.ends.append(perf_counter())

        def call(steps: int) -> float:
            clock = Clock()
            options = transformers.TrainingArguments(
                folder, per_device_train_batch_size=BATCH, max_steps=steps, bf16=CUDA, report_to=[],
                save_strategy="no", disable_tqdm=True, use_cpu=not CUDA, logging_strategy="no",
            )  # fmt: skip
            trainer = transformers.Trainer(
                model=model, args=options, train_dataset=self.data,
                data_collator=transformers.DataCollatorWithPadding(tokenizer), callbacks=[clock],
            )  # fmt: skip
            trainer.train()
            if CUDA:
                torch.cuda.synchronize()
            return (len(clock.ends) - 2) / (perf_counter() - clock.ends[1])

        return call, self.real

    def _by_hand(self, transformers: Any, tokenizer: Any, config: Any) -> tuple[Callable[[int], float], float]:
        device = torch.device("cuda" if CUDA else "cpu")
        model = transformers.BertForSequenceClassification(config).to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=CUDA)
        ids = torch.randint(1000, 30000, (BATCH, LENGTH), device=device)
        labels = torch.randint(0, 2, (BATCH,), device=device)

        def call(steps: int) -> float:
            if CUDA:
                torch.cuda.synchronize()
            start = perf_counter()
            for _ in range(steps):
                with torch.autocast(device.type, torch.bfloat16):
                    loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if CUDA:
                torch.cuda.synchronize()
            return steps / (perf_counter() - start)

        return call, float(BATCH * LENGTH)

    def turn(self) -> None:
        """Let each run some steps."""
        for name, (call, _, steps) in self.calls.items():
            before = 0
            if CUDA:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            self.speeds[name].append(call(steps))
            if CUDA:
                peak = torch.cuda.max_memory_allocated() - before
                self.peaks[f"{name} turn"] = max(self.peaks.get(f"{name} turn", 0), peak)

    def rows(self) -> list[dict[str, Any]]:
        """Return their rows of the table."""
        return [
            {
                "name": name, "steps_s": median(speeds), "sigma": scaled_mad(speeds) / median(speeds),
                "tokens_s": median(speeds) * self.calls[name][1],
                "peak_mb": (self.peaks[name] + self.peaks.get(f"{name} turn", 0)) / 2**20,
            }
            for name, speeds in self.speeds.items()
        ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
