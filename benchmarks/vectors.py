"""Vectors: steps of training a second, texts embedded a second, and what a short training is worth.

    python -m benchmarks.vectors train --model FOLDER --data FOLDER [--pairs 64 1024 65536] [--json FILE]
    python -m benchmarks.vectors train --model FOLDER --data FOLDER --kind sparse [--pairs 64]
    python -m benchmarks.vectors encode --model FOLDER --data FOLDER [--texts 1000000 --peer-texts 50000]
    python -m benchmarks.vectors quality --model FOLDER --data FOLDER [--steps 40] [--seeds 1 2 3]

``--data`` holds the folders that `benchmarks.corpus` names. Contenders are ours, a plain loop of transformers' model
(columns padded to their longest, autocast, fused AdamW, no read of the loss), and sentence-transformers where it is
installed. All train in bf16 on CUDA and float32 on a processor, with multiple negatives ranking and AdamW.

* train: pairs are two runs of words of the mixed corpus, cut at 128 tokens; rounds go through the contenders in turn,
  and the median pass over the data counts, of those after kernels are chosen and steps recorded. sentence-transformers
  comes as its model and loss in a loop, and as its trainer where datasets is installed. From 16,384 pairs on both go
  through the model in parts, and an epoch is two steps; sentence-transformers then takes one, after a small one.
  Other kinds: token vectors, weights of words (of a model at random, the folder's sizes), texts written again.
* encode: texts of the mixed corpus, after a pass over some of them; others with each size of batch that is named.
* quality: questions of XQuAD's training articles with their paragraphs; held-out articles are searched by their
  questions, before and after.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch

from benchmarks.corpus import mixed_texts
from benchmarks.vector_peers import (
    CACHED,
    RATE,
    TIMED,
    WARM,
    contenders,
    half,
    has_sentence_transformers,
    has_trainer,
    their_trainer,
    wait,
)
from flodl.train import EpochMetrics
from flodl_hf import load
from flodl_hf.heads.auto import AutoModelForMaskedLM
from flodl_hf.training import finetune
from flodl_hf.training.evaluators import retrieval_figures

# --- steps a second ------------------------------------------------------------------------------------------------


def our_steps(kind: str, model: str, rows: list[dict[str, str]], pairs: int, device: str) -> list[float]:
    """Return steps a second of each timed epoch."""
    marks: list[float] = []

    def note(event: Any) -> None:
        if isinstance(event, EpochMetrics):
            wait(device)
            marks.append(perf_counter())

    options: dict[str, Any] = {"task": "embedding" if kind == "denoising" else kind}
    if kind == "denoising":
        options["vector_loss"] = "DenoisingAutoEncoderLoss"
    elif pairs >= CACHED:
        options |= {"vector_loss": "CachedMultipleNegativesRankingLoss", "cache_tokens": 131_072}
    warm, passes = (1, 1) if pairs >= CACHED else (WARM, TIMED)
    result = finetune(
        model, train=rows, epochs=warm + passes, batch_size=pairs, lr=RATE, max_length=128,
        precision="bf16" if half(device) else "fp32", devices=device, on_event=note, progress=False,
        schedule="constant", no_duplicates=False, report=False, **options,
    )  # fmt: skip
    if result.recorded is not None:
        print(f"    {result.recorded}", flush=True)
    times = [b - a for a, b in pairwise(marks)][-passes:]
    return [len(rows) / pairs / seconds for seconds in times]


def train(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as place:
        model = str(given.model) if given.kind != "sparse" else with_words(given.model, Path(place))
        for pairs in given.pairs:
            yield from trained(given, model, pairs)


def trained(given: argparse.Namespace, model: str, pairs: int) -> Iterator[dict[str, Any]]:
    kind = given.kind
    ways: dict[str, Callable[..., list[float]]] = {"ours": lambda *data: our_steps(kind, *data)}
    ways |= {} if given.alone else contenders(kind, pairs)
    count = pairs * (2 if pairs >= CACHED else given.steps if pairs < 256 else max(8, given.steps // 4))
    texts = mixed_texts(given.data, 2 * count)
    rows = [{"anchor": a, "positive": b} for a, b in zip(texts[:count], texts[count:], strict=True)]
    if kind == "denoising":
        rows = [{"text": text} for text in texts[:count]]
    rates: dict[str, list[float]] = {name: [] for name in ways}
    most: dict[str, float] = {}
    for number in range(given.rounds):
        for name, measure in ways.items():
            gc.collect()
            if half(given.device):
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                found = measure(model, rows, pairs, given.device)
            except Exception as fault:  # another library's version may differ; what was measured stays
                if name == "ours":
                    raise
                print(f"{name}: no figure, {type(fault).__name__}: {fault}", flush=True)
                continue
            rates[name] += found
            most[name] = torch.cuda.max_memory_allocated() / 2**30 if half(given.device) else 0.0
            shown = ", ".join(f"{rate:.3g}" for rate in found)
            peak = f", peak {most[name]:.2f} GiB" if most[name] else ""
            print(f"round {number + 1}, {kind}, {pairs} a batch, {name}: {shown} steps/s{peak}", flush=True)
    for name, found in ((name, found) for name, found in rates.items() if found):
        times = round(median(rates["ours"]) / median(found), 2)
        yield {
            "kind": kind, "pairs": pairs, "contender": name, "steps_s": round(median(found), 4), "ours_times": times,
            "peak_gib": round(most[name], 2), "all": found,
        }  # fmt: skip


def with_words(folder: Path, place: Path) -> str:
    """Write a model of the sizes and vocabulary of a folder's, at random, with a head that finds words."""
    like: Any = load(folder, head="base")
    model: Any = AutoModelForMaskedLM.from_config(like.config)
    model.tokenizer = like.tokenizer
    return str(model.save_pretrained(place / "words"))


# --- texts a second ------------------------------------------------------------------------------------------------


def encode(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    texts = mixed_texts(given.data, given.texts)
    part = texts[: given.peer_texts or len(texts)]
    ours: Any = load(given.model, head="base").to(given.device)
    run = {"precision": "bf16"} if half(given.device) else {}
    calls: dict[str, tuple[Callable[[list[str]], Any], list[str]]] = {"ours": (lambda x: ours.encode(x, **run), texts)}
    if has_sentence_transformers() and not given.alone:
        from sentence_transformers import SentenceTransformer  # pyright: ignore[reportMissingImports]

        kind = {"model_kwargs": {"dtype": torch.bfloat16}} if half(given.device) else {}
        theirs = SentenceTransformer(str(given.model), device=given.device, **kind)
        for size in given.peer_batches:
            call = partial(theirs.encode, batch_size=size, show_progress_bar=False)
            calls[f"sentence-transformers, {size} a batch"] = (call, part)
    for call, of in calls.values():
        call(of[: max(64, min(10_000, len(of) // 10))])
    rates: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(given.rounds):
        for name, (call, of) in calls.items():
            wait(given.device)
            began = perf_counter()
            call(of)
            wait(given.device)
            rates[name].append(len(of) / (perf_counter() - began))
            print(f"{name}, {len(of)} texts: {rates[name][-1]:.0f} texts/s", flush=True)
    for name, found in rates.items():
        times = round(median(rates["ours"]) / median(found), 2)
        yield {"texts": len(calls[name][1]), "contender": name, "texts_s": round(median(found), 1),
               "ours_times": times, "all": found}  # fmt: skip


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
            seed=seed, schedule="linear", devices=given.device, progress=False, weight_decay=0.0, report=False,
            precision="bf16" if half(given.device) else "fp32",
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
    parser.add_argument("--kind", choices=("embedding", "multivector", "sparse", "denoising"), default="embedding")
    parser.add_argument("--alone", action="store_true", help="no other library")
    parser.add_argument("--steps", type=int, default=30, help="of an epoch; of the whole run for quality")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--texts", type=int, default=20_000)
    parser.add_argument("--peer-texts", type=int, help="texts that others encode, where they take long; all otherwise")
    parser.add_argument("--peer-batches", type=int, nargs="+", default=[256])
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
