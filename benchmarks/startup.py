"""From ``python`` to the first answer: ours, transformers' pipeline, and the floors below them, in fresh processes.

A floor imports torch, takes the weights and reads the tokenizer; it answers nothing. "floor, mapped" shows the weight
file, as "ours, mapped" does; "floor, copied" reads it into memory, as "ours" does so that no later change of the file
reaches the model. Each contender stands beside its own floor, the pipeline beside the mapped one.
A process's end counts. Runs take turns; the first of each is not counted, and leaves compiled bytecode and warm files
to the others. Seconds of the wall are what a user waits; those of the processor are disturbed less by other load.

    python -m benchmarks.startup             # a bert-base classifier is made in a temporary folder
    python -m benchmarks.startup FOLDER --rounds 9 --json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

TEXT = "A fine film that never loses its way."
FLOOR = """
import torch
from safetensors.torch import load_file
weights = load_file({folder!r} + "/model.safetensors")
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file({folder!r} + "/tokenizer.json")
"""
COPIED = """
import os
import torch
path = {folder!r} + "/model.safetensors"
weights = torch.empty(os.path.getsize(path), dtype=torch.uint8)
with open(path, "rb", buffering=0) as file:
    assert file.readinto(weights.numpy()) == len(weights)
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file({folder!r} + "/tokenizer.json")
"""
OURS = """
from flodl_hf import AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_pretrained({folder!r}, mapped={mapped})
answer = model.predict([{text!r}], untrained=True)
"""
PIPELINE = """
from transformers import pipeline
answer = pipeline("text-classification", model={folder!r}, device="cpu")([{text!r}])
"""
CONTENDERS = {
    "floor, mapped": FLOOR,
    "floor, copied": COPIED,
    "ours, mapped": OURS.replace("{mapped}", "True"),
    "ours": OURS.replace("{mapped}", "False"),
    "transformers pipeline": PIPELINE,
}
FLOORS = {"ours": "floor, copied", "floor, copied": "floor, copied"}
TAIL = """
import resource
print("\\n%r" % (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
"""


def make_bert_base(folder: Path) -> Path:
    """Write a classifier with random weights and a tokenizer of 30,522 pieces."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    from flodl_hf import AutoModelForSequenceClassification
    from flodl_hf.checkpoints.config.model_config import ModelConfig

    settings = {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
        "max_position_embeddings": 512, "type_vocab_size": 2, "vocab_size": 30522,
    }  # fmt: skip
    config = ModelConfig.for_model("bert", **settings)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    letters = "abcdefghijklmnopqrstuvwxyz.,!?'"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    stems = (f"{a}{b}{c}{d}" for a in letters[:26] for b in letters[:26] for c in letters[:26] for d in "ae")
    pieces += [piece for piece, _ in zip(stems, range(30522 - len(pieces)), strict=False)]
    inner = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    inner.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizerFast"}')
    return folder


def run(code: str) -> dict[str, float]:
    """Return the seconds and the largest memory of a fresh process."""
    # Programs run from compiled bytecode, whatever this shell says.
    surroundings = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"HF_HUB_OFFLINE": "1"}
    used = processor_seconds()
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code + TAIL],
        capture_output=True,
        text=True,
        env=surroundings,
        check=False,
    )
    wall = time.perf_counter() - begun
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return {"wall": wall, "processor": processor_seconds() - used, "memory": float(done.stdout.split()[-1])}


def processor_seconds() -> float:
    """Return what the processes that have ended have used, their ends included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="a classifier of the BERT family; made if not given")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ours", action="store_true", help="leave transformers out")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chosen = {k: v for k, v in CONTENDERS.items() if not (options.ours and k.startswith("transformers"))}
    results: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    with tempfile.TemporaryDirectory() as room:
        folder = str(options.folder or make_bert_base(Path(room)))
        codes = {name: code.format(folder=folder, text=TEXT) for name, code in chosen.items()}
        for round_ in range(options.rounds + 1):
            for name, code in codes.items():
                found = run(code)
                if round_:
                    results[name].append(found)
    table = {}
    for name, runs in results.items():
        row: dict[str, float] = {}
        floors = results[FLOORS.get(name, "floor, mapped")]
        for clock in ("wall", "processor"):
            ratios = [mine[clock] / floor[clock] for mine, floor in zip(runs, floors, strict=True)]
            row[clock] = median(r[clock] for r in runs)
            row[f"{clock} x floor"] = median(ratios)
            row[f"{clock} mad"] = 1.4826 * median(abs(r - median(ratios)) for r in ratios)
        table[name] = row | {"memory": median(r["memory"] for r in runs)}
    if options.json:
        print(json.dumps({"rounds": options.rounds, "table": table}))
        return
    print(f"medians of {options.rounds} interleaved rounds in fresh processes, warm files; MB: largest resident set")
    print(f"{'':<24}{'wall s':>8}{'x floor':>9}{'+-':>6}{'processor s':>13}{'x floor':>9}{'+-':>6}{'MB':>8}")
    for name, row in table.items():
        print(
            f"{name:<24}{row['wall']:>8.2f}{row['wall x floor']:>9.2f}{row['wall mad']:>6.2f}{row['processor']:>13.2f}"
            f"{row['processor x floor']:>9.2f}{row['processor mad']:>6.2f}{row['memory']:>8.0f}"
        )


if __name__ == "__main__":
    main()
