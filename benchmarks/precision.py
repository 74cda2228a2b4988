"""How far each precision is from exact: logits and top labels, family by family, on real texts.

Small models of every family, their weights random (seeded), with a head trained for some steps on the texts' own
words, so that logits have the size that trained ones have. Texts: SST-2 sentences through a sequence classifier,
WNUT-17 posts through a token classifier, XQuAD questions with paragraphs through a question answerer. Given are the
largest and the mean difference of a logit, and the share of rows (of tokens, of starts) whose best label differs.
A folder with a checkpoint takes the place of the random weights for its family's encoder.

    python -m benchmarks.precision [--device cuda|cpu] [--data FOLDER] [--tokenizer FOLDER] [--texts N]
"""

from __future__ import annotations

import argparse
import json
import platform
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.corpus import source_texts
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.errors import PredictError
from flodl_hf.families import FAMILIES
from flodl_hf.heads.auto import head_named
from flodl_hf.inference import RunOptions
from flodl_hf.inference.batch import Scores
from flodl_hf.inference.engine import Engine
from flodl_hf.inference.inputs import encode, split_pairs
from flodl_hf.models import EncoderModel
from flodl_hf.tokenization.tokenizer import Tokenizer

WORDS: dict[str, Any] = {
    "vocab_size": 30522, "hidden_size": 384, "num_layers": 6, "num_heads": 12, "intermediate_size": 1536,
    "max_positions": 514, "type_vocab_size": 2, "embedding_size": 128,
}  # fmt: skip
TASKS = (("SST-2", "sequence_classification"), ("WNUT-17", "token_classification"), ("XQuAD", "question_answering"))
# Published checkpoints of the relative families attend by distance; without this they would not.
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 256, "share_att_key": True}
STEPS = 60


def model_of(model_type: str, head: str, tokenizer: Tokenizer, device: str) -> EncoderModel:
    """Return a small model of a family, its weights spread as trained ones are."""
    torch.manual_seed(0)
    family = next(f for f in FAMILIES if f.model_type == model_type)
    sizes = {row.key: WORDS[row.field] for row in family.rows if row.field in WORDS}
    if model_type == "deberta-v2":
        sizes |= RELATIVE
    labels = {"token_classification": 13}.get(head, 2)
    config = ModelConfig.for_model(model_type, **sizes, id2label={str(i): f"L{i}" for i in range(labels)})
    model = head_named(head).model.from_config(config)
    model._mark_untrained(())
    model.tokenizer = tokenizer
    return model.to(device)


def train(model: EncoderModel, table: Any) -> None:
    """Let the model learn a rule about its rows' ids for some steps."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    starts = table.starts.tolist()
    model.train()
    for step in range(STEPS):
        chosen = [(step * 16 + i) % len(table) for i in range(16)]
        rows = [torch.from_numpy(table.ids[starts[i] : starts[i] + min(96, int(table.lengths[i]))]) for i in chosen]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).long().to(model.device)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(r)) for r in rows], batch_first=True).to(model.device)
        out = model(ids, attention_mask=mask)
        if model.head == "question_answering":
            scores, wanted = out.start_logits, (ids * mask.long()).argmax(1)
            loss = torch.nn.functional.cross_entropy(scores.masked_fill(mask == 0, -1e4), wanted)
            loss = loss + torch.nn.functional.cross_entropy(out.end_logits.masked_fill(mask == 0, -1e4), wanted)
        elif model._per_text:
            loss = torch.nn.functional.cross_entropy(out.logits, ids[:, 1] % 2)
        else:
            loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), (ids % 13).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


def scores_of(model: EncoderModel, table: Any, precision: str) -> list[Tensor]:
    """Return the scores of each row."""
    engine = Engine.of(model, RunOptions().changed({"precision": precision}))
    pending = engine.start(table, Scores(model._per_text))
    return list(pending.stacked()) if model._per_text else pending.placed().rows(table)


def compare(model: EncoderModel, exact: list[Tensor], found: list[Tensor]) -> tuple[float, float, float]:
    """Return the largest and mean difference, and the share of changed best labels."""
    a, b = (torch.stack(rows) if model._per_text else torch.cat(rows) for rows in (exact, found))
    gap = (a - b).abs()
    if model.head == "question_answering":
        changed = [float((x.argmax(0) != y.argmax(0)).float().mean()) for x, y in zip(exact, found, strict=True)]
        return float(gap.max()), float(gap.mean()), sum(changed) / len(changed)
    return float(gap.max()), float(gap.mean()), float((a.argmax(-1) != b.argmax(-1)).float().mean())


def inputs(data: Path, task: str, count: int) -> list[Any]:
    """Return the texts of a task."""
    if task != "XQuAD":
        return source_texts(data, {"SST-2": "sst2", "WNUT-17": "wnut17"}[task])[:count]
    articles = json.loads((data / "xquad" / "dev.json").read_text("utf-8"))["data"]
    paragraphs = [p for article in articles for p in article["paragraphs"]]
    return [(q["question"], p["context"]) for p in paragraphs for q in p["qas"]][:count]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--data", type=Path, default=Path(".data/real"))
    options.add_argument("--tokenizer", default=".data/minilm")
    options.add_argument("--texts", type=int, default=400)
    options.add_argument("--families", nargs="*", default=["bert", "roberta", "distilbert", "albert", "deberta-v2"])
    options.add_argument("--precisions", nargs="*", default=["fp32", "tf32", "bf16", "fp16", "int8"])
    args = options.parse_args()
    warnings.simplefilter("ignore")
    tokenizer = Tokenizer.from_folder(args.tokenizer)
    name = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    print(f"{name}, torch {torch.__version__}; largest | mean difference of a logit | share of changed labels")
    for model_type in args.families:
        for task, head in TASKS:
            model = model_of(model_type, head, tokenizer, args.device)
            firsts, seconds = split_pairs(inputs(args.data, task, args.texts), task)
            table = encode(tokenizer, firsts, seconds, max_tokens=256 if seconds is None else 384).table
            train(model, table)
            exact = scores_of(model, table, "exact")
            size = max(float(row.abs().max()) for row in exact)
            for precision in args.precisions:
                try:
                    found = scores_of(model, table, precision)
                except PredictError as refused:
                    if model_type == args.families[0] and task == TASKS[0][0]:
                        print(f"{precision}: {refused}")
                    continue
                largest, mean, changed = compare(model, exact, found)
                print(
                    f"{model_type:12} {task:8} {precision:5} {largest:9.2e} {mean:9.2e} {changed:7.3%}"
                    f"  (largest logit {size:.1f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
