"""One text of 32 tokens at BERT-base size, from string to label and from ids to scores, on one CUDA device.

Random weights. Milliseconds: median of the calls, and the 99th percentile. Beside it transformers' pipeline and
model (SDPA) on the same text.

    python -m benchmarks.latency [--tokenizer FOLDER] [--calls N] [--peers] [--profile]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.throughput import model_of, theirs_of
from flodl_hf.inference import RunOptions
from flodl_hf.inference.batch import Scores
from flodl_hf.inference.engine import Engine
from flodl_hf.inference.inputs import encode
from flodl_hf.tokenization.tokenizer import Tokenizer

TEXT = (
    "The quick brown fox jumps over the lazy dog while seven old men watch from a wooden bench near "
    "the river and talk about rain, bread and the news."
)


def times(call: Callable[[], Any], count: int) -> list[float]:
    """Return the milliseconds of each of ``count`` calls, after some that do not count."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        found.append((time.perf_counter() - begin) * 1e3)
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tokenizer", default=".data/minilm")
    options.add_argument("--calls", type=int, default=300)
    options.add_argument("--peers", action="store_true")
    options.add_argument("--profile", action="store_true")
    args = options.parse_args()
    warnings.simplefilter("ignore")
    tokenizer = Tokenizer.from_folder(args.tokenizer)
    model = model_of("sequence_classification", ("NEGATIVE", "POSITIVE"), tokenizer, "cuda")
    words = TEXT.split()
    text = next(
        " ".join(words[:n]) for n in range(len(words), 0, -1) if len(tokenizer.encode(" ".join(words[:n]))) <= 32
    )
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"{len(tokenizer.encode(text))} tokens; ms: median, 99th percentile")
    runs: dict[str, Callable[[], Any]] = {}
    for precision in ("bf16", "fp16", "tf32"):
        runs[f"ours {precision}, string to label"] = lambda p=precision: model.predict(text, precision=p)  # type: ignore[attr-defined]
        engine = Engine.of(model, RunOptions(precision=precision))
        table = encode(tokenizer, [text], max_tokens=512).table
        runs[f"ours {precision}, ids to scores"] = lambda e=engine, t=table: e.start(t, Scores(True)).stacked()
    if args.peers:
        from transformers import pipeline

        theirs, their_tokenizer = theirs_of(model, args.tokenizer, torch.bfloat16)
        pipe = pipeline("text-classification", model=theirs, tokenizer=their_tokenizer, device=0)
        runs["transformers pipeline bf16"] = lambda: pipe(text)
        inputs = their_tokenizer(text, return_tensors="pt").to("cuda")

        def plain() -> Any:
            with torch.inference_mode():
                return theirs(**inputs).logits.cpu()

        runs["transformers model bf16, ids to scores"] = plain
    for name, call in runs.items():
        found = sorted(times(call, args.calls))
        print(f"{name:42} {statistics.median(found):7.3f} {found[int(len(found) * 0.99)]:7.3f}", flush=True)
    if args.profile:
        import cProfile
        import pstats

        with cProfile.Profile() as profile:
            for _ in range(300):
                model.predict(text, precision="bf16")  # type: ignore[attr-defined]
        pstats.Stats(profile).sort_stats("tottime").print_stats(22)


if __name__ == "__main__":
    main()
