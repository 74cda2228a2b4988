"""What users wait for: each path in a fresh process, by the command line and the public calls, with their defaults.

Paths, each with transformers' or sentence-transformers' beside it where `--peers` is given:

* ``file``: ``flodl-hf predict MODEL --in x.jsonl --out y.jsonl``, wall seconds of the whole command;
* ``first``: from ``python`` to the first answer, with Triton's cache as it is and with an empty one;
* ``labels``: five calls of ``predict`` on 20,000 texts by a new process; also beside busy cores, and with
  ``TOKENIZERS_PARALLELISM=false`` in its environment;
* ``embed``: MiniLM's vectors of 20,000 texts, five calls;
* ``answers``: BERT-large, 6,000 questions with contexts, five calls;
* ``documents``: ranks, vectors, labels, entities and answers of documents of 1,800 tokens, truncated at 512 tokens or
  read in windows; ranks also of documents of 490 and 50 tokens;
* ``devices``: ``predict`` on 100,000 texts with one device and with all of them, and files of 200,000 rows;
* ``short``: ``flodl-hf finetune --timing`` of 1,000 rows with ``--eval``, seconds of each phase in columns, on one
  device and on two; transformers' ``Trainer`` with the same arguments beside it;
* ``finetune``: ``flodl-hf finetune`` of 9,600 and 20,000 rows on one device and on two; rows a second of later epochs.

Weights are random at the real sizes (MiniLM's are its own), since values change no time; texts are real, cut to
log-normal lengths (`benchmarks.corpus`), and tokens are counted without padding, specials included.

    python -m benchmarks.users_paths --data FOLDER --minilm FOLDER [--only labels first ...] [--peers] [--json FILE]
    python -m benchmarks.users_paths --data FOLDER --minilm FOLDER --tiny --device cpu   # does the script work?
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.corpus import mixed_texts

BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
CALLS = 5

LABELS = """
import json, sys, time
from flodl_hf import AutoModelForSequenceClassification
texts = json.load(open({texts!r}))[:{count}]
model = AutoModelForSequenceClassification.from_pretrained({model!r}, device={device!r}, dtype={dtype!r})
took = []
for _ in range({calls}):
    begin = time.perf_counter()
    found = model.predict(texts, untrained=True{more})
    took.append(time.perf_counter() - begin)
assert len(found) == len(texts)
print(json.dumps(took))
"""
EMBED = """
import json, time
from flodl_hf import AutoModel
texts = json.load(open({texts!r}))[:{count}]
model = AutoModel.from_pretrained({model!r}, device={device!r}, dtype={dtype!r})
took = []
for _ in range({calls}):
    begin = time.perf_counter()
    found = model.embed(texts)
    took.append(time.perf_counter() - begin)
assert len(found) == len(texts)
print(json.dumps(took))
"""
EMBED_PEER = """
import json, time
from sentence_transformers import SentenceTransformer
texts = json.load(open({texts!r}))[:{count}]
model = SentenceTransformer({model!r}, device={device!r}, model_kwargs={{"dtype": {dtype!r}}})
took = []
for _ in range(2):
    begin = time.perf_counter()
    model.encode(texts, batch_size=256)
    took.append(time.perf_counter() - begin)
print(json.dumps(took))
"""
ANSWERS = """
import json, time
from flodl_hf import AutoModelForQuestionAnswering
pairs = json.load(open({texts!r}))[:{count}]
model = AutoModelForQuestionAnswering.from_pretrained({model!r}, device={device!r}, dtype={dtype!r})
took = []
for _ in range({calls}):
    begin = time.perf_counter()
    found = model.answer_batch([tuple(pair) for pair in pairs], untrained=True)
    took.append(time.perf_counter() - begin)
assert len(found) == len(pairs)
print(json.dumps(took))
"""
# Token scores alone: pairs sorted by length, padded within a budget of tokens; no spans are decoded.
ANSWERS_PEER = """
import json, time, torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer
pairs = json.load(open({texts!r}))[:{count}]
tokenizer = AutoTokenizer.from_pretrained({model!r}, model_max_length=384)
model = AutoModelForQuestionAnswering.from_pretrained({model!r}, dtype={dtype!r}).to({device!r}).eval()
took = []
for _ in range(2):
    begin = time.perf_counter()
    rows = tokenizer([q for q, _ in pairs], [c for _, c in pairs], truncation="only_second")
    order = sorted(range(len(pairs)), key=lambda i: len(rows["input_ids"][i]))
    start = 0
    with torch.inference_mode():
        while start < len(order):
            stop = start + 1
            while stop < len(order) and len(rows["input_ids"][order[stop]]) * (stop + 1 - start) <= 65536:
                stop += 1
            part = [{{k: rows[k][i] for k in ("input_ids", "token_type_ids")}} for i in order[start:stop]]
            found = model(**tokenizer.pad(part, return_tensors="pt").to({device!r}))
            found.start_logits.float().cpu(), found.end_logits.float().cpu()
            start = stop
    took.append(time.perf_counter() - begin)
print(json.dumps(took))
"""
# A statement each, for documents that a model truncates or reads in windows.
DOCUMENTS = """
import json, time
from flodl_hf import load
texts = json.load(open({texts!r}))[:{count}]
model = load({model!r}, head={head!r}, device={device!r}, dtype={dtype!r})
took = []
for _ in range({calls}):
    begin = time.perf_counter()
    found = {call}
    took.append(time.perf_counter() - begin)
print(json.dumps(took))
"""
RERANK_PEER = """
import json, time
from sentence_transformers import CrossEncoder
texts = json.load(open({texts!r}))[:{count}]
model = CrossEncoder({model!r}, device={device!r}, model_kwargs={{"dtype": {dtype!r}}}, max_length=512)
took = []
for _ in range({calls}):
    begin = time.perf_counter()
    model.rank("what does the speaker ask for", texts, batch_size=32)
    took.append(time.perf_counter() - begin)
print(json.dumps(took))
"""
FIRST = """
from flodl_hf import AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_pretrained({model!r}, device={device!r}, dtype={dtype!r})
print(model.predict(["A fine film that never loses its way."], untrained=True))
"""
FIRST_PEER = """
from transformers import pipeline
pipe = pipeline("text-classification", model={model!r}, device={device!r}, dtype={dtype!r})
print(pipe(["A fine film that never loses its way."]))
"""
TRAINER = """
import csv, sys
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding
from transformers import Trainer, TrainingArguments
tokenizer = AutoTokenizer.from_pretrained({model!r}, model_max_length=512)
def rows(path):
    with open(path) as file:
        given = list(csv.DictReader(file, delimiter="\\t"))
    ids = tokenizer([row["text"] for row in given], truncation=True)
    return [{{**{{k: ids[k][i] for k in ids}}, "labels": int(row["label"])}} for i, row in enumerate(given)]
model = AutoModelForSequenceClassification.from_pretrained({model!r})
arguments = TrainingArguments({out!r}, num_train_epochs={epochs}, per_device_train_batch_size={batch}, bf16={bf16},
    eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, report_to=[], disable_tqdm=True)
trainer = Trainer(model, arguments, train_dataset=rows({train!r}), eval_dataset=rows({held_out!r}),
    data_collator=DataCollatorWithPadding(tokenizer))
trainer.train()
trainer.evaluate()
trainer.save_model({out!r})
"""
SPIN = "while True: pass"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--minilm", type=Path, required=True, help="a folder of all-MiniLM-L6-v2")
    parser.add_argument("--only", nargs="*", default=[], choices=sorted(PATHS), metavar="PATH")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="small models and few texts, to see that everything works")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        world = World(args, Path(place))
        print(world.about(), flush=True)
        for name in args.only or PATHS:
            print(f"\n== {name}", flush=True)
            PATHS[name](world)
        if args.json:
            args.json.write_text(json.dumps({"about": world.about(), "rows": world.rows}, indent=1) + "\n")


class World:
    """Models, texts and files that the paths use, and the figures that they found."""

    def __init__(self, args: argparse.Namespace, place: Path) -> None:
        self.args, self.place, self.device = args, place, args.device
        self.dtype = "bfloat16" if args.device.startswith("cuda") else "float32"
        self.rows: list[dict[str, Any]] = []
        self.scale = 100 if args.tiny else 1
        self.made: dict[str, Path] = {}
        self.count = 20_000 // self.scale
        self.texts = mixed_texts(args.data, max(self.count, 100_000 // self.scale), seed=7)
        (place / "texts.json").write_text(json.dumps(self.texts))

    def about(self) -> str:
        """Return the machine and the versions."""
        import torch

        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return f"{names or platform.processor()}, {os.cpu_count()} cores, torch {torch.__version__}"

    def tokens(self, count: int) -> int:
        """Return the tokens of the first texts, specials included."""
        from tokenizers import Tokenizer

        inner = Tokenizer.from_file(str(self.args.minilm / "tokenizer.json"))
        inner.no_padding()
        inner.no_truncation()
        return sum(map(len, inner.encode_batch_fast(self.texts[:count])))

    def model(self, head: str, size: dict[str, int]) -> Path:
        """Return a folder with a random BERT of a size and a head, and MiniLM's tokenizer."""
        name = f"{head}-{size['hidden_size']}"
        if name not in self.made:
            settings = {"vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2}
            self.made[name] = self.write(name, "bert", head, settings | (TINY if self.args.tiny else size))
            for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
                shutil.copy(self.args.minilm / file, self.made[name] / file)
        return self.made[name]

    def ranker(self) -> Path:
        """Return a folder with a random XLM-RoBERTa of the large size, one score, and a Unigram tokenizer."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

        specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        inner = Tokenizer(models.Unigram())
        inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=8000, special_tokens=specials, unk_token="<unk>", show_progress=False
        )
        inner.train_from_iterator(self.texts[:20_000], trainer)
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
        )
        settings = {
            "vocab_size": 250_002, "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1,
            "bos_token_id": 0, "eos_token_id": 2, "id2label": {0: "LABEL_0"}, "label2id": {"LABEL_0": 0},
        }  # fmt: skip
        size = TINY if self.args.tiny else LARGE
        folder = self.write("ranker", "xlm-roberta", "sequence_classification", settings | size)
        inner.save(str(folder / "tokenizer.json"))
        named = {"bos_token": 0, "pad_token": 1, "eos_token": 2, "unk_token": 3, "mask_token": 4}
        words = {name: specials[at] for name, at in named.items()} | {"cls_token": "<s>", "sep_token": "</s>"}
        words |= {"tokenizer_class": "XLMRobertaTokenizer", "model_max_length": 512}
        (folder / "tokenizer_config.json").write_text(json.dumps(words))
        return folder

    def write(self, name: str, kind: str, head: str, settings: dict[str, Any]) -> Path:
        """Write a random model and return its folder."""
        import torch

        from flodl_hf.checkpoints.config.model_config import ModelConfig
        from flodl_hf.heads.auto import head_named

        torch.manual_seed(0)
        if head == "token_classification":
            settings |= {"id2label": {0: "O", 1: "B-PER", 2: "I-PER"}, "label2id": {"O": 0, "B-PER": 1, "I-PER": 2}}
        model = head_named(head).model.from_config(ModelConfig.for_model(kind, **settings))
        if head == "token_classification":
            # As in texts, about one word in ten belongs to an entity.
            (bias,) = (p for p in model.graph.parameters() if p.shape == (3,))
            bias.data[0] = 1.0
        model._mark_untrained(())
        model.save_pretrained(self.place / name)
        return self.place / name

    def note(self, path: str, what: str, seconds: list[float], amount: float = 0.0, unit: str = "") -> None:
        """Print and keep one row."""
        self.rows.append({"path": path, "what": what, "seconds": seconds, "amount": amount, "unit": unit})
        told = " ".join(f"{s:.3f}" for s in seconds)
        rate = ""
        if amount:
            later = seconds[1:] or seconds
            middle = statistics.median(later)
            mad = 1.4826 * statistics.median([abs(s - middle) for s in later]) / middle
            rate = f"  | first {amount / seconds[0]:,.0f}, later {amount / middle:,.0f} {unit} (scaled MAD {mad:.1%})"
        print(f"{what:56} {told} s{rate}", flush=True)


def fresh(code: str, env: dict[str, str] | None = None) -> tuple[float, str]:
    """Return wall seconds and output of a new interpreter."""
    return command([sys.executable, "-W", "ignore", "-c", code], env)


def command(args: list[str], env: dict[str, str] | None = None) -> tuple[float, str]:
    """Return wall seconds and output of a command."""
    # Programs run from compiled bytecode, whatever this shell says.
    surroundings = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | (env or {})
    begin = time.perf_counter()
    done = subprocess.run(args, capture_output=True, text=True, env=surroundings, check=False)
    took = time.perf_counter() - begin
    if done.returncode:
        print(f"FAILED: {' '.join(args)[:200]}\n{done.stderr[-1500:]}", flush=True)
        return float("nan"), ""
    return took, done.stdout + done.stderr


def last_json(output: str) -> list[float]:
    """Return the numbers that a script printed last."""
    lines = [line for line in output.splitlines() if line.startswith("[")]
    return json.loads(lines[-1]) if lines else [float("nan")]


def cli(*words: str) -> list[str]:
    """Return the command line's arguments."""
    return [sys.executable, "-m", "flodl_hf.cli", *words]


@contextmanager
def busy(cores: int) -> Iterator[None]:
    """Keep some cores busy meanwhile."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(cores)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def files(world: World) -> None:
    """Files of texts by the command line without any flag, which chooses the device."""
    model = str(world.model("sequence_classification", BASE))
    for rows in (20_000, 200_000):
        rows //= world.scale
        source = world.place / f"{rows}.jsonl"
        texts = (world.texts * (rows // len(world.texts) + 1))[:rows]
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        for flags in ([], ["--device", world.device, "--precision", "bf16" if world.dtype == "bfloat16" else "fp32"]):
            out = world.place / f"out-{rows}.jsonl"
            if not flags and rows > 20_000 // world.scale:
                continue
            took, told = command([*cli("predict", model, "--in", str(source), "--out", str(out)), *flags])
            out.unlink(missing_ok=True)
            world.note("file", f"{rows:,} rows {' '.join(flags)}", [took])
            print("   ", " / ".join(told.strip().splitlines()[:3])[:300], flush=True)


def first(world: World) -> None:
    """From ``python`` to the first answer."""
    given = {"model": str(world.model("sequence_classification", BASE)), "device": world.device, "dtype": world.dtype}
    found: dict[str, list[float]] = {}
    for round_ in range(4):
        found.setdefault("first answer", []).append(fresh(FIRST.format(**given))[0])
        if round_ < 2:
            with tempfile.TemporaryDirectory() as cache:
                took = fresh(FIRST.format(**given), {"TRITON_CACHE_DIR": cache})[0]
            found.setdefault("first answer, empty Triton cache", []).append(took)
        if world.args.peers and round_ < 2:
            found.setdefault("transformers pipeline", []).append(fresh(FIRST_PEER.format(**given))[0])
        found.setdefault("import torch, make a CUDA context", []).append(
            fresh(f"import torch; torch.zeros(1, device={world.device!r})")[0]
        )
    for what, seconds in found.items():
        world.note("first", what, seconds)


def labels(world: World) -> None:
    """Labels of many texts."""
    given = {
        "model": str(world.model("sequence_classification", BASE)), "device": world.device, "dtype": world.dtype,
        "texts": str(world.place / "texts.json"), "count": world.count, "calls": CALLS, "more": "",
    }  # fmt: skip
    tokens = world.tokens(world.count) / 1e3
    for round_ in range(2):
        found = last_json(fresh(LABELS.format(**given))[1])
        world.note("labels", f"predict, process {round_ + 1}", found, tokens, "ktok/s")
    with busy(max(1, (os.cpu_count() or 2) // 8)):
        found = last_json(fresh(LABELS.format(**given))[1])
    world.note("labels", "predict beside busy cores (one in eight)", found, tokens, "ktok/s")
    found = last_json(fresh(LABELS.format(**given), {"TOKENIZERS_PARALLELISM": "false"})[1])
    world.note("labels", "predict, TOKENIZERS_PARALLELISM=false inherited", found, tokens, "ktok/s")


def embed(world: World) -> None:
    """Vectors of many texts."""
    given = {
        "model": str(world.args.minilm), "device": world.device, "dtype": world.dtype,
        "texts": str(world.place / "texts.json"), "count": world.count, "calls": CALLS,
    }  # fmt: skip
    tokens = world.tokens(world.count) / 1e3
    for round_ in range(2):
        found = last_json(fresh(EMBED.format(**given))[1])
        world.note("embed", f"MiniLM embed, process {round_ + 1}", found, tokens, "ktok/s")
    if world.args.peers:
        found = last_json(fresh(EMBED_PEER.format(**given))[1])
        world.note("embed", "sentence-transformers encode, batch 256", found, tokens, "ktok/s")


def answers(world: World) -> None:
    """Answers to many questions."""
    data = [json.loads((world.args.data / "xquad" / f"{part}.json").read_text()) for part in ("train", "dev")]
    articles = [article for part in data for article in part["data"]]
    asked = [(qa["question"], p["context"]) for article in articles for p in article["paragraphs"] for qa in p["qas"]]
    wanted = 6_000 // world.scale
    pairs = []
    for turn in range(-(-wanted // len(asked))):
        # Further turns drop sentences from the front, so that contexts differ and lengths spread.
        for question, context in asked:
            parts = context.split(". ")
            pairs.append((question, ". ".join(parts[turn % max(1, len(parts)) :])))
    pairs = pairs[:wanted]
    path = world.place / "pairs.json"
    path.write_text(json.dumps(pairs))
    given = {
        "model": str(world.model("question_answering", LARGE)), "device": world.device, "dtype": world.dtype,
        "texts": str(path), "count": wanted, "calls": CALLS,
    }  # fmt: skip
    found = last_json(fresh(ANSWERS.format(**given))[1])
    world.note("answers", "BERT-large answer_batch", found, wanted, "questions/s")
    if world.args.peers:
        found = last_json(fresh(ANSWERS_PEER.format(**given))[1])
        world.note("answers", "transformers by hand, no decoding", found, wanted, "questions/s")


def documents(world: World) -> None:
    """Long documents."""
    counts = {"rerank": 100, "embed": 1_500, "labels": 1_500, "entities": 300, "answers": 300}
    counts = {name: max(2, count // world.scale) for name, count in counts.items()}
    words = [word for text in world.texts for word in text.split()]
    base, given = world.place / "documents.json", {"device": world.device, "dtype": world.dtype, "calls": CALLS}

    def written(size: int) -> str:
        """Write documents of so many words and return the file."""
        path = base.with_stem(f"documents-{size}")
        texts = [" ".join(words[at * size : (at + 1) * size]) for at in range(max(counts.values()))]
        path.write_text(json.dumps(texts))
        return str(path)

    ranker = world.ranker()
    for size, tokens in ((1_350, 1_800), (365, 490), (38, 50)):
        call = "model.rerank('what does the speaker ask for', texts, untrained=True, truncate=True)"
        given |= {"model": str(ranker), "head": "sequence_classification", "count": counts["rerank"], "call": call}
        given["texts"] = written(size)
        found = last_json(fresh(DOCUMENTS.format(**given))[1])
        world.note("documents", f"XLM-R large rerank, {tokens:,} tokens", found, counts["rerank"], "documents/s")
        if world.args.peers:
            found = last_json(fresh(RERANK_PEER.format(**given))[1])
            world.note("documents", f"sentence-transformers, {tokens:,} tokens", found, counts["rerank"], "documents/s")
    labels, ask = "model.predict(texts, untrained=True", "'what does the speaker ask for'"
    given["texts"] = written(1_350)
    for name, head, what, call in (
        ("embed", "base", "MiniLM embed, truncated", "model.embed(texts)"),
        ("embed", "base", "MiniLM embed, windows", "model.embed(texts, windows=True)"),
        ("labels", "sequence_classification", "labels, truncated", f"{labels}, truncate=True)"),
        ("labels", "sequence_classification", "labels, windows", f"{labels})"),
        ("entities", "token_classification", "entities, windows", f"{labels})"),
        ("answers", "question_answering", "answers, windows",
         f"model.answer_batch([({ask}, text) for text in texts], untrained=True)"),
    ):  # fmt: skip
        model = world.args.minilm if name == "embed" else world.model(head, BASE)
        given |= {"model": str(model), "head": head, "count": counts[name], "call": call}
        world.note("documents", what, last_json(fresh(DOCUMENTS.format(**given))[1]), counts[name], "documents/s")
        if world.args.peers and name == "embed" and "windows" not in what:
            found = last_json(fresh(EMBED_PEER.format(**given))[1])
            world.note("documents", f"sentence-transformers, {name}", found, counts[name], "documents/s")


def devices(world: World) -> None:
    """Several devices."""
    import torch

    several = max(2, torch.cuda.device_count())
    kind = world.device.partition(":")[0]
    given = {
        "model": str(world.model("sequence_classification", BASE)), "device": world.device, "dtype": world.dtype,
        "texts": str(world.place / "texts.json"), "count": 100_000 // world.scale, "calls": 10,
    }  # fmt: skip
    tokens = world.tokens(100_000 // world.scale) / 1e3
    names = [f"{kind}:{i}" if kind == "cuda" else kind for i in range(several)]
    for what, more in (("one device", ""), (f"{several} devices", f", devices={names!r}")):
        found = last_json(fresh(LABELS.format(**given, more=more))[1])
        world.note("devices", f"predict 100,000 texts, {what}", found, tokens, "ktok/s")
    source = world.place / "many.jsonl"
    texts = world.texts * 2
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for count in (1, several):
        out = world.place / f"out-{count}.jsonl"
        words = ["--in", str(source), "--out", str(out), "--devices", ",".join(names[:count]), "--timing"]
        words += ["--precision", "bf16" if world.dtype == "bfloat16" else "fp32"]
        took, told = command(cli("predict", given["model"], *words))
        world.note("devices", f"predict --in, {len(texts):,} rows, devices {count}", [took])
        print("   ", " / ".join(told.strip().splitlines()[-3:])[:400], flush=True)


def table(world: World, name: str, rows: int) -> Path:
    """Write a table of texts with two labels and return the file."""
    path = world.place / f"{name}.tsv"
    texts = [" ".join(text.split()[:90]) for text in world.texts[:rows]]
    path.write_text("text\tlabel\n" + "".join(f"{text}\t{i % 2}\n" for i, text in enumerate(texts)))
    return path


def tuned(world: World, devices: int, *words: str) -> tuple[float, str]:
    """Run one fine-tune by the command line and return its seconds and its output."""
    model = str(world.model("sequence_classification", BASE))
    precision = "bf16" if world.dtype == "bfloat16" else "fp32"
    kind = ",".join(["cpu"] * devices) if world.device == "cpu" else str(devices)
    out = world.place / "tuned"
    found = command(cli("finetune", model, *words, "--precision", precision, "--devices", kind, "--out", str(out)))
    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(out.with_name("tuned.checkpoints"), ignore_errors=True)
    return found


def counted(world: World) -> tuple[int, ...]:
    """Return the numbers of devices to use."""
    import torch

    return (1, 2) if torch.cuda.device_count() > 1 or world.device == "cpu" else (1,)


def short(world: World) -> None:
    """A short fine-tune, from the command to the folder."""
    train, held_out = table(world, "train-short", max(64, 1_000 // world.scale)), table(world, "dev", 200)
    given = {
        "model": str(world.model("sequence_classification", BASE)), "out": str(world.place / "trainer"), "epochs": 3,
        "batch": 32, "bf16": world.dtype == "bfloat16", "train": str(train), "held_out": str(held_out),
    }  # fmt: skip
    for round_ in range(3):
        for devices in counted(world):
            batch = str(32 * devices)
            words = ["--train", str(train), "--eval", str(held_out), "--epochs", "3", "--batch-size", batch, "--timing"]
            took, told = tuned(world, devices, *words)
            world.note("short", f"1,000 rows, 3 epochs, devices {devices}, round {round_ + 1}", [took])
            print("    " + " | ".join(re.findall(r"(?:seconds: .*|exit: .*|gradients: .*)", told)), flush=True)
        if world.args.peers and round_ < 2:
            world.note("short", "transformers.Trainer, one device", [fresh(TRAINER.format(**given))[0]])
            shutil.rmtree(given["out"], ignore_errors=True)


def finetune(world: World) -> None:
    """Fine-tuning by the command line."""
    for rows, batch, epochs in ((9_600, 32, 4), (9_600, 64, 4), (20_000, 64, 2), (9_600, 128, 4)):
        train = table(world, f"train-{rows}", rows // world.scale)
        for devices in counted(world):
            words = ["--train", str(train), "--epochs", str(epochs), "--batch-size", str(batch), "--timing"]
            took, told = tuned(world, devices, *words)
            speeds = [float(found.replace(",", "")) for found in re.findall(r"([\d,]+) rows/s", told)]
            later = statistics.median(speeds[1:]) if len(speeds) > 1 else float("nan")
            name = f"{rows:,} rows, devices {devices}, batch {batch}: {later:,.0f} rows/s of later epochs"
            world.note("finetune", name, [took])
            print("    " + " | ".join(re.findall(r"(?:seconds: .*|exit: .*|gradients: .*)", told)), flush=True)


PATHS: dict[str, Callable[[World], None]] = {
    "first": first,
    "file": files,
    "labels": labels,
    "embed": embed,
    "answers": answers,
    "documents": documents,
    "devices": devices,
    "short": short,
    "finetune": finetune,
}


if __name__ == "__main__":
    main()
