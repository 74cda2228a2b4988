"""Raw texts to answers on a processor: this package in its precisions beside its peers.

    python -m benchmarks.cpu --data FOLDER --minilm FOLDER [--tasks embeddings classification entities answers]
                             [--texts 48] [--rounds 5] [--threads N] [--clock wall|processor] [--ours] [--json]

Embeddings run the given MiniLM; the other tasks run BERT-base with random weights and MiniLM's tokenizer. Texts are
real: SST-2, WNUT-17 and XQuAD below ``--data``, drawn evenly. Contenders take turns within a round; figures are
medians over rounds of the ratio to the first contender of the same round, with their scaled median absolute
deviation. "% of ideal" compares with the products' own speed: the fastest product of 1,024 rows that was measured on
this machine at that precision, over the operations of real tokens in all layers. ``--clock processor`` counts the
processor's time instead of the wall's, which other load disturbs less; it makes sense with ``--threads 1``.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.peers import on_cpu
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.heads.auto import head_named
from flodl_hf.inference import cpu
from flodl_hf.models import EncoderModel
from flodl_hf.nn.backends.cpu import (
    Int8Linear,
    OneDnnLinear,
    Scratch,
    TorchLinear,
    has_int8,
    has_onednn,
    sums_in_32_bits,
)
from flodl_hf.tokenization.readers import load_rows

TASKS = ("embeddings", "classification", "entities", "answers")
HEADS = {"embeddings": "base", "classification": "seqcls", "entities": "tokcls", "answers": "qa"}
PRECISIONS = ("exact", "fp32", "bf16", "int8")
BASE = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
    "max_position_embeddings": 512, "type_vocab_size": 2, "vocab_size": 30522,
}  # fmt: skip
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json")


@dataclass
class Contender:
    """One way to answer.

    Attributes:
        name: for the table.
        ask: texts to answers.
        precision: whose peak it is compared with.
        seconds: of each round.
        answers: of the last round.
    """

    name: str
    ask: Callable[[Sequence[Any]], Any]
    precision: str = "fp32"
    seconds: list[float] = field(default_factory=list)
    answers: Any = None


def texts_of(task: str, data: Path, count: int) -> list[Any]:
    """Return real texts, spread evenly over what the data hold, in an order that repeats."""
    squad = load_rows(data / "xquad/dev.json")
    if task == "answers":
        return spread([(row["question"], row["context"]) for row in squad], count)
    sst = [row["text"] for row in load_rows(data / "sst2/dev.tsv")]
    wnut = [" ".join(row["words"]) for row in load_rows(data / "wnut17/dev.conll")]
    if task == "entities":
        return spread(wnut, count)
    # Peers cut a text where the model's folder says, ours reads on in windows: only texts that fit are compared.
    contexts = [row["context"] for row in squad if len(row["context"].split()) < 130]
    fifth = count // 5
    found = [*spread(sst, 2 * fifth), *spread(wnut, 2 * fifth), *spread(contexts, fifth)]
    # In no order: who fills batches up as they come pays for the longest text of each.
    random.Random(0).shuffle(found)
    return found


def spread(items: list[Any], count: int) -> list[Any]:
    return [items[int(i)] for i in np.linspace(0, len(items) - 1, min(count, len(items)))]


def model_folder(task: str, minilm: Path, room: Path) -> Path:
    """Return the folder that all contenders load, in float32."""
    folder = room / task
    if folder.exists():
        return folder
    if task == "embeddings":
        head_named("base").model.from_pretrained(minilm, dtype="float32").save_pretrained(folder)
    else:
        labels = {"classification": 2, "entities": 13}.get(task, 2)
        config = ModelConfig.for_model("bert", **BASE, id2label={str(i): f"L{i}" for i in range(labels)})
        head_named(HEADS[task]).model.from_config(config).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if not (folder / name).exists() and (minilm / name).exists():
            shutil.copy(minilm / name, folder / name)
    return folder


def ours(task: str, model: EncoderModel, precision: str) -> Callable[[Sequence[Any]], Any]:
    call: Any = model
    if task == "embeddings":
        return lambda texts: call.embed(list(texts), precision=precision).numpy()
    if task == "classification":

        def classify(texts: Sequence[str]) -> np.ndarray:
            answers = call.predict(list(texts), precision=precision, untrained=True)
            return np.array([[s for _, s in sorted((p.label, p.score) for p in row)] for row in answers])

        return classify
    if task == "answers":
        return lambda pairs: call.answer_batch(list(pairs), precision=precision, untrained=True)
    return lambda texts: call.predict(list(texts), precision=precision, untrained=True)


def contenders(task: str, folder: Path, options: argparse.Namespace, room: Path) -> list[Contender]:
    threads = torch.get_num_threads()
    model = head_named(HEADS[task]).model.from_pretrained(folder, dtype="float32")
    found: list[Contender] = []

    def add(name: str, make: Callable[[], Any], precision: str = "fp32") -> None:
        try:
            found.append(Contender(name, make(), precision))
        except ImportError as fault:
            print(f"  left out: {name} ({fault})", file=sys.stderr)

    place = str(folder)
    if not options.ours:
        if task == "embeddings":
            add("sentence-transformers, 32", partial(on_cpu.sentence_transformers, place, 32))
        elif task == "answers":
            add("transformers, filled up unsorted, 32", lambda: unsorted(on_cpu.by_hand(task, place, 32)))
        else:
            for batch in (32, 8, 1):
                add(f"transformers pipeline, {batch}", partial(on_cpu.pipeline, task, place, batch))
        for batch in (32, 8):
            add(f"transformers by hand, {batch}", partial(on_cpu.by_hand, task, place, batch))
        if task in ("embeddings", "classification"):
            files = room / f"{task}-files"
            files.mkdir(exist_ok=True)
            add("ONNX Runtime optimised, 8", partial(on_cpu.onnx_runtime, task, place, 8, threads, files))
            add("OpenVINO, 8", partial(on_cpu.openvino, task, place, 8, threads, files))
            add("ONNX Runtime int8, 8", partial(on_cpu.onnx_runtime, task, place, 8, threads, files, True), "int8")
    for precision in options.precisions:
        reason = None if precision in ("exact", "fp32") else cpu.missing(precision)
        if reason:
            print(f"  left out: ours {precision}: {reason}", file=sys.stderr)
            continue
        add(f"ours, {precision}", partial(ours, task, model, precision), precision)
    return found


def unsorted(ask: Any) -> Any:
    """Return the same without its sorting: what a loop over batches does."""
    return lambda texts: [answer for i in range(0, len(texts), 32) for answer in ask(texts[i : i + 32])]


# --- the ideal ----------------------------------------------------------------------------------------


def operations(model: EncoderModel, lengths: Sequence[int]) -> float:
    """Return the floating-point operations of real tokens in all layers: products of weights, and attention's."""
    c: Any = model.config.encoder
    weights = 2 * (4 * c.hidden_size**2 + 2 * c.hidden_size * c.intermediate_size)
    return float(c.num_layers * (weights * sum(lengths) + 4 * c.hidden_size * sum(n * n for n in lengths)))


def peaks(width: int, clock: Callable[[], float]) -> dict[str, float]:
    """Return the fastest product of 1,024 rows at each precision, in operations a second."""
    rows, out = 1024, 4 * width
    x, weight, bias = torch.randn(rows, width), torch.randn(out, width), torch.randn(out)
    kinds: dict[str, list[Callable[[], Any]]] = {"fp32": [partial(TorchLinear(weight, bias, Scratch()), x, "peak")]}
    if has_onednn(torch.float32):
        kinds["fp32"].append(partial(OneDnnLinear(weight, bias, at_once=True), x))
    if cpu.missing("bf16") is None:
        half = OneDnnLinear(weight.bfloat16(), bias.bfloat16(), at_once=True)
        kinds["bf16"] = [partial(half, x.bfloat16())]
    if has_int8():
        product = Int8Linear(weight, bias, 8 if sums_in_32_bits() else 7)
        kinds["int8"] = [partial(product.multiplied, product.quantised(x)[0].clone())]
    found = {}
    with torch.inference_mode():
        for precision, ways in kinds.items():
            best = float("inf")
            for way in ways:
                way()
                for _ in range(5):
                    begun = clock()
                    way()
                    best = min(best, clock() - begun)
            found[precision] = 2.0 * rows * width * out / best
    return found | {"exact": found["fp32"]}


# --- running ------------------------------------------------------------------------------------------


def measure(task: str, options: argparse.Namespace, room: Path) -> dict[str, Any]:
    clock = time.process_time if options.clock == "processor" else time.perf_counter
    folder = model_folder(task, options.minilm, room)
    texts = texts_of(task, options.data, options.texts)
    field_ = contenders(task, folder, options, room)
    model = head_named(HEADS[task]).model.from_pretrained(folder, dtype="float32")
    tokenizer = model.tokenizer
    assert tokenizer is not None
    firsts, seconds = zip(*texts, strict=True) if task == "answers" else (texts, None)
    rows = [row for group in tokenizer.encode_rows(firsts, seconds, max_tokens=model.max_tokens) for row in group]
    lengths = [len(row.ids) for row in rows]
    work = operations(model, lengths)
    best: dict[str, float] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for contender in field_:
            contender.ask(texts[:4])
            contender.ask(texts[:4])
        for _ in range(options.rounds):
            for precision, speed in peaks(model.config.encoder.hidden_size, clock).items():
                best[precision] = max(best.get(precision, 0.0), speed)
            for contender in field_:
                begun = clock()
                contender.answers = contender.ask(texts)
                contender.seconds.append(clock() - begun)
    exact = next((c for c in field_ if c.name == "ours, exact"), field_[0])
    table = [row_of(contender, field_[0], exact, task, work, best, sum(lengths)) for contender in field_]
    return {"task": task, "texts": len(texts), "tokens": sum(lengths), "peak": best, "rows": table}


def row_of(
    contender: Contender,
    first: Contender,
    exact: Contender,
    task: str,
    work: float,
    best: dict[str, float],
    tokens: int,
) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(first.seconds, contender.seconds, strict=True)]
    middle = median(ratios)
    seconds = median(contender.seconds)
    row: dict[str, Any] = {
        "name": contender.name,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "ratio": middle,
        "mad": 1.4826 * median(abs(r - middle) for r in ratios),
        "ideal": work / seconds / best[contender.precision],
    }
    if task in ("classification", "embeddings"):
        row["difference"] = float(np.abs(np.asarray(contender.answers) - np.asarray(exact.answers)).max())
        if task == "classification":
            row["same"] = float((contender.answers.argmax(1) == exact.answers.argmax(1)).mean())
    elif contender.name.startswith("ours"):
        row["same"] = float(np.mean([a == b for a, b in zip(spans(contender), spans(exact), strict=True)]))
    return row


def spans(contender: Contender) -> list[Any]:
    """Return answers without their scores."""
    return [
        [(p.start, p.end, getattr(p, "label", None)) for p in (row if isinstance(row, (list, tuple)) else [row])]
        for row in contender.answers
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with sst2, wnut17 and xquad")
    parser.add_argument("--minilm", type=Path, required=True, help="a sentence-transformers MiniLM folder")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--ours", action="store_true", help="without peers")
    parser.add_argument("--room", type=Path, help="where models and files are kept; a temporary folder if not given")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    capability = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {threads} threads, {capability}, {platform.machine()}, {options.clock} clock")
    with tempfile.TemporaryDirectory() as temporary:
        room = options.room or Path(temporary)
        room.mkdir(exist_ok=True, parents=True)
        for task in options.tasks:
            found = measure(task, options, room)
            if options.json:
                print(json.dumps(found))
                continue
            speeds = ", ".join(f"{name} {speed / 1e9:.0f}" for name, speed in found["peak"].items())
            print(f"\n{task}: {found['texts']} texts, {found['tokens']} tokens; peak of products, GFLOP/s: {speeds}")
            print(
                f"{'':<38}{'seconds':>9}{'tok/s':>8}{'x first':>9}{'+-':>6}{'% ideal':>9}{'difference':>12}{'same':>7}"
            )
            for row in found["rows"]:
                difference = f"{row['difference']:.1e}" if "difference" in row else ""
                same = f"{row['same']:.3f}" if "same" in row else ""
                print(
                    f"{row['name']:<38}{row['seconds']:>9.3f}{row['tokens_per_s']:>8.0f}{row['ratio']:>9.2f}"
                    f"{row['mad']:>6.2f}{100 * row['ideal']:>9.1f}{difference:>12}{same:>7}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
