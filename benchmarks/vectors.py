"""Vectors: steps of training a second, texts embedded a second, and what a short training is worth.

    python -m benchmarks.vectors train --model FOLDER --data FOLDER [--pairs 64 1024] [--device cuda:0] [--json FILE]
    python -m benchmarks.vectors encode --model FOLDER --data FOLDER [--texts 20000] [--device cuda:0]
    python -m benchmarks.vectors quality --model FOLDER --data FOLDER [--steps 40] [--seeds 1 2 3]

``--data`` holds the folders that `benchmarks.corpus` names. Contenders are ours, a plain loop of transformers' model
(columns padded to their longest, autocast, fused AdamW, no read of the loss), and sentence-transformers where it is
installed. All train in bf16 on CUDA and float32 on a processor, with multiple negatives ranking and AdamW.

* train: pairs are two runs of words of the mixed corpus, cut at 128 tokens; rounds go through the contenders in turn,
  and the median pass over the data counts, of those after kernels are chosen and steps recorded. sentence-transformers
  comes as its model and loss in a loop, and as its trainer where datasets is installed.
* encode: texts of the mixed corpus, after a pass over some of them.
* quality: questions of XQuAD's training articles with their paragraphs; held-out articles are searched by their
  questions, before and after.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch

from benchmarks.corpus import mixed_texts
from flodl.train import EpochMetrics
from flodl_hf import load
from flodl_hf.finetuning import finetune
from flodl_hf.vectors.judging import retrieval_figures

WARM, TIMED = 2, 3  # epochs, or parts of a loop
RATE, SCALE = 2e-5, 20.0


def has_sentence_transformers() -> bool:
    return importlib.util.find_spec("sentence_transformers") is not None


def has_trainer() -> bool:
    """Whether sentence-transformers' trainer can be made, which needs datasets."""
    return has_sentence_transformers() and importlib.util.find_spec("datasets") is not None


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def half(device: str) -> bool:
    return device.startswith("cuda")


# --- steps a second ------------------------------------------------------------------------------------------------


def our_steps(model: str, rows: list[dict[str, str]], pairs: int, device: str) -> list[float]:
    """Return steps a second of each timed epoch."""
    marks: list[float] = []

    def note(event: Any) -> None:
        if isinstance(event, EpochMetrics):
            wait(device)
            marks.append(perf_counter())

    finetune(
        model, train=rows, task="embedding", epochs=WARM + TIMED, batch_size=pairs, lr=RATE, max_length=128,
        precision="bf16" if half(device) else "fp32", devices=device, on_event=note, progress=False,
        schedule="constant", no_duplicates=False,
    )  # fmt: skip
    times = [b - a for a, b in pairwise(marks)][-TIMED:]
    return [len(rows) / pairs / seconds for seconds in times]


def plain_steps(model: str, rows: list[dict[str, str]], pairs: int, device: str) -> list[float]:
    """Return steps a second of transformers' model in a loop."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model).to(device).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, fused=half(device))

    def step(batch: list[dict[str, str]]) -> None:
        columns = []
        with torch.autocast("cuda", torch.bfloat16, enabled=half(device)):
            for name in ("anchor", "positive"):
                texts = [row[name] for row in batch]
                given = tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt").to(device)
                states, mask = network(**given).last_hidden_state.float(), given["attention_mask"][:, :, None]
                columns.append(torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1))
        scores = SCALE * columns[0] @ columns[1].T
        torch.nn.functional.cross_entropy(scores, torch.arange(len(scores), device=device)).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return timed(step, rows, pairs, device)


def their_steps(model: str, rows: list[dict[str, str]], pairs: int, device: str) -> list[float]:
    """Return steps a second of sentence-transformers' model and loss in a loop, without its trainer."""
    from sentence_transformers import SentenceTransformer  # pyright: ignore[reportMissingImports]
    from sentence_transformers.sentence_transformer import losses  # pyright: ignore[reportMissingImports]

    network = SentenceTransformer(model, device=device).train()
    network.max_seq_length = 128
    loss = losses.MultipleNegativesRankingLoss(network, scale=SCALE)
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, fused=half(device))
    prepare = getattr(network, "preprocess", None) or network.tokenize

    def step(batch: list[dict[str, str]]) -> None:
        columns = [prepare([row[name] for row in batch]) for name in ("anchor", "positive")]
        given = [{k: v.to(device) if hasattr(v, "to") else v for k, v in column.items()} for column in columns]
        with torch.autocast("cuda", torch.bfloat16, enabled=half(device)):
            value = loss(given, None)
        value.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return timed(step, rows, pairs, device)


def timed(step: Callable[..., None], rows: list[dict[str, str]], pairs: int, device: str) -> list[float]:
    """Return steps a second of passes over the rows, the first of which warms up."""
    found = []
    for part in range(3):
        wait(device)
        began = perf_counter()
        for start in range(0, len(rows), pairs):
            step(rows[start : start + pairs])
        wait(device)
        if part:
            found.append(len(rows) / pairs / (perf_counter() - began))
    return found


def trainer_steps(model: str, rows: list[dict[str, str]], pairs: int, device: str) -> list[float]:
    """Return steps a second of sentence-transformers' trainer."""
    times: list[float] = []
    with tempfile.TemporaryDirectory() as place:
        trainer = their_trainer(model, rows, pairs, device, place, epochs=WARM + TIMED, times=times)
        trainer.train()
    steps = [b - a for a, b in pairwise(times)][-TIMED:]
    return [len(rows) / pairs / seconds for seconds in steps]


def their_trainer(
    model: str, rows: list[dict[str, str]], pairs: int, device: str, place: str, *, times: list[float] | None = None,
    seed: int = 42, **further: Any,
) -> Any:  # fmt: skip
    """Return sentence-transformers' trainer with our recipe."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer  # pyright: ignore[reportMissingImports]
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments  # pyright: ignore[reportMissingImports]
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss  # pyright: ignore[reportMissingImports]
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            wait(device)
            if times is not None:
                times.append(perf_counter())

    settings = {"num_train_epochs": further.pop("epochs", 1), **further}
    arguments = Arguments(
        place, per_device_train_batch_size=pairs, learning_rate=RATE, bf16=half(device), report_to=[], seed=seed,
        save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=not half(device), warmup_steps=0,
        lr_scheduler_type=settings.pop("schedule", "constant"), **settings,
    )  # fmt: skip
    network = SentenceTransformer(model, device=device)
    network.max_seq_length = min(128 if times is not None else 256, network.max_seq_length or 512)
    loss = MultipleNegativesRankingLoss(network, scale=SCALE)
    return SentenceTransformerTrainer(
        network, arguments, train_dataset=Dataset.from_list(rows), loss=loss, callbacks=[Clock()]
    )


def train(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    contenders: dict[str, Callable[..., list[float]]] = {"ours": our_steps, "plain loop": plain_steps}
    if has_sentence_transformers():
        contenders["sentence-transformers in a loop"] = their_steps
    if has_trainer():
        contenders["sentence-transformers' trainer"] = trainer_steps
    else:
        print("sentence-transformers' trainer is left out: it needs sentence-transformers and datasets", flush=True)
    for pairs in given.pairs:
        count = pairs * (given.steps if pairs < 256 else max(8, given.steps // 4))
        texts = mixed_texts(given.data, 2 * count)
        rows = [{"anchor": a, "positive": b} for a, b in zip(texts[:count], texts[count:], strict=True)]
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(given.rounds):
            for name, measure in contenders.items():
                try:
                    found = measure(str(given.model), rows, pairs, given.device)
                except Exception as fault:  # another library's version may differ; what was measured stays
                    if name == "ours":
                        raise
                    print(f"{name}: no figure, {type(fault).__name__}: {fault}", flush=True)
                    continue
                rates[name] += found
                shown = ", ".join(f"{rate:.2f}" for rate in found)
                print(f"round {number + 1}, {pairs} pairs, {name}: {shown} steps/s", flush=True)
        for name, found in ((name, found) for name, found in rates.items() if found):
            yield {"pairs": pairs, "contender": name, "steps_s": round(median(found), 3), "all": found}


# --- texts a second ------------------------------------------------------------------------------------------------


def encode(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    texts = mixed_texts(given.data, given.texts)
    ours: Any = load(given.model, head="base").to(given.device)
    run = {"precision": "bf16"} if half(given.device) else {}
    calls: dict[str, Callable[[list[str]], Any]] = {"ours": lambda part: ours.encode(part, **run)}
    if has_sentence_transformers():
        from sentence_transformers import SentenceTransformer  # pyright: ignore[reportMissingImports]

        kind = {"model_kwargs": {"dtype": torch.bfloat16}} if half(given.device) else {}
        theirs = SentenceTransformer(str(given.model), device=given.device, **kind)
        calls["sentence-transformers"] = lambda part: theirs.encode(part, batch_size=256, show_progress_bar=False)
    for call in calls.values():
        call(texts[: max(64, len(texts) // 10)])
    rates: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(given.rounds):
        for name, call in calls.items():
            wait(given.device)
            began = perf_counter()
            call(texts)
            wait(given.device)
            rates[name].append(len(texts) / (perf_counter() - began))
    for name, found in rates.items():
        yield {"texts": len(texts), "contender": name, "texts_s": round(median(found), 1), "all": found}


# --- what it is worth ----------------------------------------------------------------------------------------------


def questions(path: Path) -> list[dict[str, str]]:
    articles = json.loads(path.read_text("utf-8"))["data"]
    return [
        {"anchor": question["question"], "positive": paragraph["context"]}
        for article in articles
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]


def judged(encode: Callable[[list[str]], Any], rows: list[dict[str, str]]) -> dict[str, float]:
    """Return how well questions find their paragraphs among all of the held-out articles."""
    corpus = list(dict.fromkeys(row["positive"] for row in rows))
    relevant = [{corpus.index(row["positive"])} for row in rows]
    found = retrieval_figures(encode([row["anchor"] for row in rows]), encode(corpus), relevant)
    return {name: found[name] for name in ("recall@1", "ndcg@10", "mrr@10")}


def quality(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    rows, held_out = (questions(given.data / "xquad" / f"{name}.json") for name in ("train", "dev"))
    model = str(given.model)
    before: Any = load(model, head="base")
    yield {"contender": "before", **judged(before.encode, held_out)}
    runs: dict[str, list[dict[str, float]]] = {"ours": [], "sentence-transformers": []}
    for seed in given.seeds:
        tuned: Any = finetune(
            model, train=rows, task="embedding", max_steps=given.steps, epochs=99, batch_size=given.batch, lr=RATE,
            seed=seed, schedule="linear", devices=given.device, progress=False, weight_decay=0.0,
        ).model  # fmt: skip
        runs["ours"].append(judged(tuned.encode, held_out))
        print(f"seed {seed}, ours: {runs['ours'][-1]}", flush=True)
        if has_trainer():
            from sentence_transformers.base.sampler import BatchSamplers  # pyright: ignore[reportMissingImports]

            with tempfile.TemporaryDirectory() as place:
                trainer = their_trainer(
                    model, rows, given.batch, given.device, place, max_steps=given.steps, schedule="linear", seed=seed,
                    batch_sampler=BatchSamplers.NO_DUPLICATES,
                )  # fmt: skip
                trainer.train()
                runs["sentence-transformers"].append(judged(trainer.model.encode, held_out))
            print(f"seed {seed}, sentence-transformers: {runs['sentence-transformers'][-1]}", flush=True)
    for name, found in runs.items():
        if found:
            means = {figure: round(mean(run[figure] for run in found), 4) for figure in found[0]}
            yield {"contender": name, "steps": given.steps, "seeds": list(given.seeds), **means, "all": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "encode", "quality"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pairs", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--steps", type=int, default=30, help="of an epoch; of the whole run for quality")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--texts", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    name = torch.cuda.get_device_name(given.device) if half(given.device) else platform.processor() or "processor"
    print(f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    rows = []
    for row in {"train": train, "encode": encode, "quality": quality}[given.what](given):
        rows.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items() if key != "all"), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
