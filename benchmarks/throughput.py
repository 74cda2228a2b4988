"""Raw strings to answers at BERT-base size on one CUDA device, beside transformers.

20,000 real texts of log-normal lengths (`benchmarks.corpus`), random weights, the tokenizer of a local folder.
Contenders take turns; figures are medians over rounds, ± scaled MAD. Tokens are real ones, specials included.
Labels: transformers' pipeline at batch 32 and 256 on a part of the texts; transformers' model on texts sorted and
padded by hand; ours in each precision. Entities: the pipeline with aggregation "simple" at batch 32 and 256; ours
likewise. The token classifier's outside label is given a lead over the others, found on the texts themselves, so
that about one word in ten belongs to an entity; how many entities that makes is printed. Two rounds come before
those that count: shapes are recorded when they come again.

    python -m benchmarks.throughput [--data FOLDER] [--tokenizer FOLDER] [--texts N] [--rounds N] [--peers]
        [--budgets N ...] [--profile]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.corpus import mixed_texts
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.heads.auto import head_named
from flodl_hf.models import EncoderModel
from flodl_hf.tokenization.tokenizer import Tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "max_position_embeddings": 512, "type_vocab_size": 2,
}  # fmt: skip
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG")
# Dense products of BERT-base, two operations for each weight of its 85 M.
FLOPS_A_TOKEN = 2 * 85e6
# Rounds before those that count.
WARM = 2


def model_of(head: str, labels: tuple[str, ...], tokenizer: Tokenizer, device: str) -> EncoderModel:
    """Return a random BERT-base with one head."""
    torch.manual_seed(0)
    config = ModelConfig.for_model("bert", **SIZES, id2label=dict(enumerate(labels)))
    model = head_named(head).model.from_config(config)
    model._mark_untrained(())
    model.tokenizer = tokenizer
    return model.eval().to(device)


def make_entities_rare(model: Any, texts: list[str], share: float = 0.1) -> float:
    """Give the outside label a lead that leaves about ``share`` of the words in entities; return the share found.

    Words are those between spaces.
    """
    some = texts[:500]
    words = sum(len(text.split()) for text in some)
    bias = model.graph.get_parameter("head.classifier.bias")

    def found() -> float:
        return sum(len(e.word.split()) for es in model.predict(some, aggregation="simple") for e in es) / words

    low, high = 0.0, 4.0
    for _ in range(12):
        middle = (low + high) / 2
        with torch.no_grad():
            bias[0] = middle
        low, high = (middle, high) if found() > share else (low, middle)
    return found()


def theirs_of(ours: EncoderModel, folder: str, dtype: torch.dtype) -> Any:
    """Return transformers' model with the same weights, and its tokenizer."""
    import tempfile

    import transformers

    with tempfile.TemporaryDirectory() as place:
        ours.save_pretrained(Path(place) / "model")
        kind = {
            "sequence_classification": transformers.AutoModelForSequenceClassification,
            "token_classification": transformers.AutoModelForTokenClassification,
        }[ours.head]
        model = kind.from_pretrained(str(Path(place) / "model"), dtype=dtype)
    return model.to(ours.device).eval(), transformers.AutoTokenizer.from_pretrained(folder, model_max_length=512)


def by_hand(model: Any, tokenizer: Any, texts: list[str], budget: int) -> list[Any]:
    """Return label scores by transformers' model on texts sorted by length and padded within a token budget."""
    rows = tokenizer(texts, truncation=True)["input_ids"]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    out: list[Any] = [None] * len(rows)
    with torch.inference_mode():
        start = 0
        while start < len(order):
            stop = start + 1
            while stop < len(order) and len(rows[order[stop]]) * (stop + 1 - start) <= budget:
                stop += 1
            part = order[start:stop]
            batch = tokenizer.pad({"input_ids": [rows[i] for i in part]}, return_tensors="pt").to(model.device)
            for i, scores in zip(part, model(**batch).logits.float().softmax(-1).tolist(), strict=True):
                out[i] = scores
            start = stop
    return out


def seconds(call: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds of a call and the peak of device memory in GiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin, torch.cuda.max_memory_allocated() / 2**30


def middle(values: list[float]) -> str:
    """Return the median and scaled MAD as text."""
    center = statistics.median(values)
    return f"{center:8.1f} ±{1.4826 * statistics.median([abs(v - center) for v in values]):.1f}"


def shares(model: EncoderModel, texts: list[str], precision: str) -> str:
    """Return where the time of one run goes: host steps alone, and the device."""
    from flodl_hf.inference.batch import Scores
    from flodl_hf.inference.inputs import encode
    from flodl_hf.inference.pipeline import Session

    begin = time.perf_counter()
    offsets = model.head == "token_classification"
    assert model.tokenizer is not None
    encoded = encode(model.tokenizer, texts, max_tokens=512, offsets=offsets)
    tokenised = time.perf_counter()
    session = Session(model, {"precision": precision})  # type: ignore[typeddict-item]
    torch.cuda.synchronize()
    launch = time.perf_counter()
    pending = session.start(encoded.table, Scores(model._per_text))
    launched = time.perf_counter()
    list(pending.parts())
    done = time.perf_counter()
    return (
        f"tokens to arrays {tokenised - begin:.3f} s, launching {launched - launch:.3f} s, device {done - launch:.3f} s"
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", type=Path, default=Path(".data/real"))
    options.add_argument("--tokenizer", default=".data/minilm")
    options.add_argument("--texts", type=int, default=20_000)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--peers", action="store_true")
    options.add_argument("--peer-texts", type=int, default=2_000)
    options.add_argument("--tasks", nargs="*", default=["labels", "entities"])
    options.add_argument("--precisions", nargs="*", default=["bf16", "fp16", "tf32", "fp32"])
    options.add_argument("--budgets", type=int, nargs="*", default=[])
    options.add_argument("--profile", action="store_true")
    args = options.parse_args()
    warnings.simplefilter("ignore")
    device = "cuda"
    tokenizer = Tokenizer.from_folder(args.tokenizer)
    texts = mixed_texts(args.data, args.texts)
    rows = tokenizer.encode_rows(texts, max_tokens=512, overflow="truncate", offsets=False)
    sizes = [len(row[0]) for row in rows]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"{len(texts)} texts, {sum(sizes)} tokens", flush=True)
    for task in args.tasks:
        head = "sequence_classification" if task == "labels" else "token_classification"
        model = model_of(head, ("NEGATIVE", "POSITIVE") if task == "labels" else TAGS, tokenizer, device)
        if task == "entities":
            rare = make_entities_rare(model, texts)
            count = sum(map(len, model.predict(texts, aggregation="simple")))  # type: ignore[attr-defined]
            print(f"{rare:.1%} of the words are in entities, {count} entities in all", flush=True)
        runs: dict[str, tuple[Callable[[], Any], int]] = {}
        given: dict[str, Any] = {} if task == "labels" else {"aggregation": "simple"}
        for precision in args.precisions:
            for budget in args.budgets or [None]:
                name = f"ours {precision}" + (f" budget {budget}" if budget else "")
                extra = given | {"precision": precision, "token_budget": budget}
                runs[name] = (partial(model.predict, texts, **extra), sum(sizes))  # type: ignore[attr-defined]
        if args.peers:
            runs |= peers(task, model, args, texts, sizes)
        found: dict[str, list[float]] = {name: [] for name in runs}
        memory: dict[str, float] = {}
        first: dict[str, float] = {}
        for round_ in range(-WARM, args.rounds):
            for name, (call, tokens) in runs.items():
                # Theirs warms up in one round, and takes long.
                if round_ < -1 and name.startswith("transformers"):
                    continue
                took, peak = seconds(call)
                first.setdefault(name, tokens / took / 1e3)
                if round_ >= 0:
                    found[name].append(tokens / took / 1e3)
                    memory[name] = peak
        print(f"\n{task}: ktok/s, peak GiB, share of 797 TFLOP/s; ktok/s of the very first call")
        for name, values in found.items():
            share = statistics.median(values) * 1e3 * FLOPS_A_TOKEN / 797e12
            print(f"{name:40} {middle(values)}  {memory[name]:6.2f}  {share:6.1%}  {first[name]:8.1f}", flush=True)
        if args.profile:
            print("shares:", shares(model, texts, args.precisions[0]), flush=True)


def peers(
    task: str, model: EncoderModel, args: argparse.Namespace, texts: list[str], sizes: list[int]
) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return transformers' contenders with their tokens."""
    from transformers import pipeline

    theirs, tokenizer = theirs_of(model, args.tokenizer, torch.bfloat16)
    some, tokens = texts[: args.peer_texts], sum(sizes[: args.peer_texts])
    name = "text-classification" if task == "labels" else "token-classification"
    extra: dict[str, Any] = {"truncation": True} if task == "labels" else {"aggregation_strategy": "simple"}
    runs: dict[str, tuple[Callable[[], Any], int]] = {}
    for size in (32, 256):
        pipe = pipeline(name, model=theirs, tokenizer=tokenizer, device=0, batch_size=size, **extra)
        runs[f"transformers pipeline bf16, batch {size}"] = (lambda pipe=pipe: pipe(some), tokens)
    if task == "labels":
        runs["transformers by hand bf16, 32k sorted"] = (lambda: by_hand(theirs, tokenizer, texts, 32_768), sum(sizes))
    return runs


if __name__ == "__main__":
    main()
