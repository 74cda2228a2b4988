"""The host's side of prediction, task by task: what a text costs between the string and its answer beside the device.

The device is a stand-in whose passes return at once with scores that were made before; everything else runs as on an
accelerator: tokenising, planning, batching into buckets, decoding, making results. Texts are made up, of log-normal
lengths (median 22 words, at most 300), and so is the WordPiece vocabulary that reads them. Given are, in microseconds
a text, the time of the calling thread (what the interpreter lock is held for, and steady on a busy host) for each step
done in turn, and the wall time of the public call, in which the steps overlap.

Last, how tokenising alone scales: by the library's threads and our own (``scaling``), and by processes (``processes``).

    python -m benchmarks.host_path [--only labels spans scaling ...] [--texts N] [--rounds N] [--json FILE]
    python -m benchmarks.host_path --only scaling processes --processes 4 8 16 32
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import random
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.heads.auto import head_named
from flodl_hf.inference import pipeline
from flodl_hf.inference.batch import Batch
from flodl_hf.inference.cuda_graphs import SMALL
from flodl_hf.inference.engine import Engine
from flodl_hf.inference.inputs import encode
from flodl_hf.models import EncoderModel
from flodl_hf.nn.buckets import Buffer, bucket_of
from flodl_hf.tokenization.backend import cores
from flodl_hf.tokenization.tokenizer import Tokenizer

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ENTITIES = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC")
BUDGET = 65_536


def words_of(draw: random.Random, count: int) -> list[str]:
    """Return made-up words, common ones first and shorter."""
    sounds = [a + b for a in "bcdfghklmnprstvz" for b in "aeiou"]
    found: dict[str, None] = {}
    while len(found) < count:
        size = 1 + min(4, len(found) // (count // 6) + draw.randrange(2))
        found["".join(draw.choice(sounds) for _ in range(size)) + draw.choice(["", "n", "s", "r"])] = None
    return list(found)


def tokenizer_of(words: list[str], size: int = 30_522) -> Tokenizer:
    """Return a WordPiece tokenizer that knows most of the words whole and the others by pieces."""
    pieces = [f"##{a}{b}" for a in "bcdfghklmnprstvz" for b in "aeiou"]
    letters = [*"abcdefghijklmnopqrstuvwxyz.,!?'"]
    vocabulary = dict.fromkeys([*SPECIALS, *letters, *(f"##{c}" for c in letters), *pieces, *words])
    vocabulary |= dict.fromkeys(f"[unused{i}]" for i in range(size - len(vocabulary)))
    inner = Inner(models.WordPiece({token: i for i, token in enumerate(vocabulary)}, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(prefix="##")
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    inner.add_special_tokens(list(SPECIALS))
    named = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
    settings = json.dumps({**named, "unk_token": "[UNK]", "model_max_length": 512})
    files = {"tokenizer.json": inner.to_str().encode(), "tokenizer_config.json": settings.encode()}
    return Tokenizer.from_files(files, folder="made up")


def texts_of(draw: random.Random, words: list[str], count: int, median: int = 22) -> list[str]:
    """Return texts of log-normal lengths; common words are common, some begin a sentence or end one."""
    weights = np.cumsum(1.0 / np.arange(3, len(words) + 3))
    found = []
    for _ in range(count):
        length = max(1, min(300, round(draw.lognormvariate(np.log(median), 1.0))))
        chosen = draw.choices(words, cum_weights=weights.tolist(), k=length) if length < 8 else None
        chosen = chosen or [words[i] for i in np.searchsorted(weights, _uniform(draw, length) * weights[-1])]
        found.append(" ".join(word + "," if i % 9 == 8 else word for i, word in enumerate(chosen)).capitalize() + ".")
    return found


def _uniform(draw: random.Random, count: int) -> np.ndarray:
    return np.random.default_rng(draw.getrandbits(32)).random(count)


def model_of(head: str, tokenizer: Tokenizer, width: int, **settings: Any) -> EncoderModel:
    """Return a model whose graph is never run."""
    sizes = {"hidden_size": width, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    sizes["type_vocab_size"] = 2
    config = ModelConfig.for_model("bert", vocab_size=30_522, max_position_embeddings=512, **sizes, **settings)
    model = head_named(head).model.from_config(config)
    model._mark_untrained(())
    model.tokenizer = tokenizer
    return model


class StandIn:
    """A device whose passes are done at once.

    Args:
        columns: numbers of a result.
        first: added to the first column, so that most tokens bear the first label.
    """

    def __init__(self, columns: int, first: float = 0.0) -> None:
        made = np.random.default_rng(0).standard_normal((BUDGET, columns), np.float32)
        made[:, 0] += first
        self.results = torch.from_numpy(made)

    def run(self, engine: Engine, batch: Batch, alone: bool) -> tuple[torch.Tensor, Any]:
        """Do what `Engine._bucketed` does on the host, and return results at once."""
        large = len(batch.ids) > SMALL
        bucket = bucket_of(batch.lengths, most=engine.longest, full=engine.budget if large else None)
        Buffer(bucket, types=engine.types).write(batch.ids, batch.types, batch.lengths)
        return self.results[: batch.count], None


@contextmanager
def in_place_of_a_device(stand_in: StandIn) -> Iterator[None]:
    """Have predictions run on the stand-in, as an accelerator would be used."""
    with ExitStack() as held:
        held.enter_context(patch("flodl_hf.inference.pipeline.works_by_itself", lambda device: True))
        held.enter_context(patch.dict("flodl_hf.inference.batch.BUDGETS", cpu=BUDGET))
        held.enter_context(patch.object(Engine, "_run", lambda self, batch, alone: stand_in.run(self, batch, alone)))
        yield


class Steps:
    """The steps of calls, one after another, with the time of the calling thread that each took."""

    def __init__(self) -> None:
        self.seconds = {"encode": 0.0, "start": 0.0, "finish": 0.0}

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the steps of the calls inside, without overlap."""
        with ExitStack() as held:
            for step, method in (("encode", "_encode"), ("start", "_start"), ("finish", "_decode")):
                call = getattr(pipeline.Session, method)
                timed = lambda loop, window, step=step, call=call: self._timed(step, call, loop, window)  # noqa: E731
                held.enter_context(patch.object(pipeline.Session, method, timed))
            held.enter_context(patch("flodl_hf.inference.pipeline.works_by_itself", lambda device: False))
            yield

    def _timed(self, step: str, call: Callable[..., Any], *args: Any) -> Any:
        begin = time.thread_time()
        found = call(*args)
        self.seconds[step] += time.thread_time() - begin
        return found


def tasks(texts: list[str], tokenizer: Tokenizer) -> dict[str, tuple[StandIn, list[Any], Callable[[list[Any]], Any]]]:
    """Return for each task its stand-in, its items and the public call."""
    labels = {str(i): f"label {i}" for i in range(2)}
    entities = {str(i): name for i, name in enumerate(ENTITIES)}
    classifier: Any = model_of("sequence_classification", tokenizer, 8, id2label=labels)
    tagger: Any = model_of("token_classification", tokenizer, 8, id2label=entities)
    answerer: Any = model_of("question_answering", tokenizer, 8)
    filler: Any = model_of("masked_lm", tokenizer, 8)
    encoder: Any = model_of("base", tokenizer, 384)
    short = [" ".join(text.split()[:10]) for text in texts]
    pairs = list(zip(short, texts, strict=True))
    asked = [(a, f"{b} {c}") for (a, b), c in zip(pairs[:6000], texts[6000:12000] or texts, strict=False)]
    masked = [f"{text} [MASK]" for text in texts[: len(texts) // 10]]
    # Of five words for each mask: probabilities, token ids, and whether all scores were finite.
    best = StandIn(11)
    best.results[:, 5:10] = torch.randint(1000, 20_000, (len(best.results), 5))
    best.results[:, 10] = 1
    return {
        "labels": (StandIn(2), texts, lambda x: classifier.predict(x)),
        "pairs": (StandIn(2), pairs, lambda x: classifier.predict(x)),
        "tokens": (StandIn(len(ENTITIES), 4.0), texts, lambda x: tagger.predict(x)),
        "spans": (StandIn(2), asked, lambda x: answerer.answer_batch(x)),
        "masks": (best, masked, lambda x: filler.fill_mask(x)),
        "vectors": (StandIn(384), texts, lambda x: encoder.embed(x)),
    }


def measured(stand_in: StandIn, items: list[Any], call: Callable[[list[Any]], Any], rounds: int) -> dict[str, float]:
    """Return medians in microseconds an item: of each step's thread time, and of the whole call's wall time."""
    scale = 1e6 / len(items)
    rows: list[dict[str, float]] = []
    with in_place_of_a_device(stand_in):
        call(items[:200])
        for _ in range(rounds):
            steps = Steps()
            with steps.measure():
                found = call(items)
            del found
            gc.collect()
            begin, cpu = time.perf_counter(), time.process_time()
            found = call(items)
            took, cpu = time.perf_counter() - begin, time.process_time() - cpu
            assert len(found) == len(items)
            del found
            row = steps.seconds | {"wall": took, "all cores": cpu}
            rows.append({name: seconds * scale for name, seconds in row.items()})
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def scaling(texts: list[str], tokenizer: Tokenizer, rounds: int) -> None:
    """Print how fast texts become arrays of ids by threads: the library's and ours, for one caller and for two."""
    halves = [texts[i : i + 4096] for i in range(0, len(texts), 4096)]

    def two() -> None:
        list(callers.map(lambda part: encode(tokenizer, part, max_tokens=None), halves))

    print(f"\ntexts to arrays of ids by threads, {cores()} cores, seconds for all texts")
    with ThreadPoolExecutor(2) as callers:
        for name, own, way in (
            ("threads of the library", "true", lambda: encode(tokenizer, texts, max_tokens=None)),
            ("two callers of those", "true", two),
            ("threads of our own", "false", lambda: encode(tokenizer, texts, max_tokens=None)),
            ("two callers of those", "false", two),
        ):
            with patch.dict(os.environ, {"TOKENIZERS_PARALLELISM": own}):
                took = [_took(way) for _ in range(rounds + 1)][1:]
            print(f"{name:26}{statistics.median(wall for wall, _ in took):8.3f}", flush=True)


def processes(texts: list[str], tokenizer: Tokenizer, rounds: int, counts: list[int]) -> None:
    """Print how fast texts become arrays of ids by processes, and what this interpreter spends on it.

    Each process has a tokenizer and one thread; texts go there as one piece of bytes, arrays come back as theirs.
    """
    parts = [texts[i : i + 512] for i in range(0, len(texts), 512)]
    before = encode(tokenizer, texts, max_tokens=None).table
    print(f"\ntexts to arrays of ids by processes, {cores()} cores; us a text of this interpreter")
    spawn = get_context("spawn")
    for count in counts or sorted({2, 4, 8, 16, cores()}):
        lines = [spawn.Pipe() for _ in range(count)]
        started = [spawn.Process(target=_serve, args=(its, tokenizer.to_json()), daemon=True) for _, its in lines]
        for process in started:
            process.start()
        mine = [line for line, _ in lines]
        for line in mine:
            line.recv_bytes()
        found = _by_processes(mine, parts)
        ids, counted = (np.concatenate([part[i] for part in found]) for i in (0, 1))
        assert np.array_equal(ids, before.ids[before.sequence >= 0])
        assert np.array_equal(counted, before.counts)
        took = [_took(lambda mine=mine: _by_processes(mine, parts)) for _ in range(rounds)]
        wall, held = (statistics.median(row[i] for row in took) for i in (0, 1))
        print(f"{count:3} processes{'':12}{wall:8.3f}{held / len(texts) * 1e6:8.2f}", flush=True)
        for line, process in zip(mine, started, strict=True):
            line.close()
            process.terminate()
            process.join()


def _took(way: Callable[[], Any]) -> tuple[float, float]:
    """Return wall seconds, and those of the calling thread."""
    begin, held = time.perf_counter(), time.thread_time()
    way()
    return time.perf_counter() - begin, time.thread_time() - held


def _by_processes(lines: list[Any], parts: list[list[str]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return ids and counts of each part; a process has one that it works at and one that waits."""
    found: list[Any] = [None] * len(parts)
    waiting: dict[Any, list[int]] = {line: [] for line in lines}
    left = iter(range(len(parts)))
    idle: list[Any] = [*lines, *lines]
    while True:
        for line in idle:
            if (part := next(left, None)) is not None:
                line.send_bytes(pickle.dumps(parts[part], protocol=5))
                waiting[line].append(part)
        if not any(waiting.values()):
            return found
        idle = list(wait([line for line, own in waiting.items() if own]))
        for line in idle:
            counts = np.frombuffer(line.recv_bytes(), np.int64)
            found[waiting[line].pop(0)] = np.frombuffer(line.recv_bytes(), np.int32), counts


def _serve(line: Any, definition: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    backend = Tokenizer.from_files({"tokenizer.json": definition.encode()})._backend
    line.send_bytes(b"ready")
    while True:
        try:
            ids, counts = backend.flat(pickle.loads(line.recv_bytes()))
        except EOFError:
            return
        line.send_bytes(counts.tobytes())
        line.send_bytes(ids.tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--texts", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", nargs="*", type=int, default=[])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    draw = random.Random(0)
    words = words_of(draw, 30_000)
    tokenizer = tokenizer_of(words[:28_000])
    texts = texts_of(draw, words, args.texts)
    inner = Inner.from_str(tokenizer.to_json())
    begin, thread = time.perf_counter(), time.thread_time()
    tokens = sum(map(len, inner.encode_batch_fast(texts)))
    took, held = (
        (now - then) / len(texts) * 1e6 for now, then in ((time.perf_counter(), begin), (time.thread_time(), thread))
    )
    print(f"{len(texts):,} texts, {tokens:,} tokens")
    print(f"tokenizers alone: {took:.1f} us a text, {held:.1f} of the calling thread")
    print(f"\n{'us an item':12}{'encode':>9}{'start':>9}{'finish':>9}{'together':>10}{'| wall':>9}{'all cores':>11}")
    kept = {}
    for name, (stand_in, items, call) in tasks(texts, tokenizer).items():
        if args.only and name not in args.only:
            continue
        row = kept[name] = measured(stand_in, items, call, args.rounds)
        whole = row["encode"] + row["start"] + row["finish"]
        steps = "".join(f"{row[step]:9.2f}" for step in ("encode", "start", "finish"))
        print(f"{name:12}{steps}{whole:10.2f}{row['wall']:9.2f}{row['all cores']:11.2f}", flush=True)
    if not args.only or "scaling" in args.only:
        scaling(texts, tokenizer, args.rounds)
    if not args.only or "processes" in args.only:
        processes(texts, tokenizer, args.rounds, args.processes)
    if args.json:
        args.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
