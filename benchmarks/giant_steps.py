"""A checkpoint of ten billion weights from end to end: loaded, asked, trained in shards, exported, converted.

    python -m benchmarks.giant_steps --folder DIR [--json FILE] [--only write,load] [--layers 48 --hidden 4096]

Writes an XLM-RoBERTa-XL with random weights in bfloat16 (without options the shape of XXL, 21.4 GB) in several files,
and takes it through the public commands and calls, each step in processes of its own that are started for it. Of each
step: seconds, the most memory that any process held (its own, and pages of files), and the most own memory of all
together. A step that fails is told, and the next go on. Results are printed as they come, and written to ``--json``.

``convert`` comes last because it uses the checkpoint up: a disk needs room for two copies of the weights. The folder
stays with ``--keep``, so that other steps can follow in a second call with ``--only``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORDS = ("the", "film", "was", "good", "bad", "long", "a", "story", "of", "two", "friends", "and", "their", "dog")
LABELS = ("bad", "good")
PROBE = "roberta.encoder.layer.{}.attention.self.query.weight"


@dataclass(frozen=True)
class Shape:
    """The size of the model, and where everything is."""

    folder: Path
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    shard_bytes: int
    ranks: int
    device: str
    batch: int

    @property
    def source(self) -> Path:
        """The checkpoint."""
        return self.folder / "source"

    def tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return names and shapes, as transformers has them."""
        wide, d = 4 * self.hidden, self.hidden
        found: list[tuple[str, tuple[int, ...]]] = [
            ("roberta.embeddings.word_embeddings.weight", (self.vocabulary, d)),
            ("roberta.embeddings.position_embeddings.weight", (514, d)),
            ("roberta.embeddings.token_type_embeddings.weight", (1, d)),
        ]
        products = (
            ("attention.self.query", d, d), ("attention.self.key", d, d), ("attention.self.value", d, d),
            ("attention.output.dense", d, d), ("intermediate.dense", wide, d), ("output.dense", d, wide),
        )  # fmt: skip
        for i in range(self.layers):
            at = f"roberta.encoder.layer.{i}"
            for name, rows, columns in products:
                found += [(f"{at}.{name}.weight", (rows, columns)), (f"{at}.{name}.bias", (rows,))]
            for norm in ("attention.self_attn_layer_norm", "LayerNorm"):
                found += [(f"{at}.{norm}.weight", (d,)), (f"{at}.{norm}.bias", (d,))]
        found += [("roberta.encoder.LayerNorm.weight", (d,)), ("roberta.encoder.LayerNorm.bias", (d,))]
        found += [("classifier.dense.weight", (d, d)), ("classifier.dense.bias", (d,))]
        return [*found, ("classifier.out_proj.weight", (2, d)), ("classifier.out_proj.bias", (2,))]


# ---- what a step is made of: functions that run in a process of their own -----------------------------------------


def write(shape: Shape) -> dict[str, Any]:
    """Write the checkpoint: one block of random numbers again and again, norms of ones, biases of zeros."""
    import torch
    from safetensors.torch import save_file

    from flodl_hf import AutoModelForSequenceClassification
    from flodl_hf.checkpoints.config.model_config import ModelConfig
    from flodl_hf.training.demo import train_wordpiece

    # A small one says what configuration and tokenizer look like.
    config = ModelConfig.for_model(
        "xlm-roberta-xl", vocab_size=1000, hidden_size=64, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=256, max_position_embeddings=514, type_vocab_size=1, labels=list(LABELS),
    )  # fmt: skip
    small = AutoModelForSequenceClassification.from_config(config).to(torch.bfloat16)
    small.tokenizer = train_wordpiece([" ".join(WORDS)] * 4, vocab_size=200)
    small._mark_untrained(())
    small.save_pretrained(shape.source)
    for name in ("model.safetensors", "checksums.json"):
        (shape.source / name).unlink(missing_ok=True)
    told = json.loads((shape.source / "config.json").read_text())
    told |= {"hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads}
    told |= {"intermediate_size": 4 * shape.hidden, "vocab_size": shape.vocabulary}
    (shape.source / "config.json").write_text(json.dumps(told, indent=2) + "\n")

    torch.manual_seed(0)
    block = (torch.randn(1 << 24) * 0.02).to(torch.bfloat16)

    def values(place: int, name: str, size: tuple[int, ...]) -> Any:
        if name.endswith("bias"):
            return torch.zeros(size, dtype=torch.bfloat16)
        if len(size) == 1:
            return torch.ones(size, dtype=torch.bfloat16)
        count = size[0] * size[1]
        turned = block.roll(997 * place)  # no two tensors alike
        return turned.repeat(-(-count // len(turned)))[:count].view(size)

    shards: list[list[tuple[int, str, tuple[int, ...]]]] = [[]]
    room = shape.shard_bytes
    total = 0
    for place, (name, size) in enumerate(shape.tensors()):
        nbytes = 2 * (size[0] if len(size) == 1 else size[0] * size[1])
        if shards[-1] and nbytes > room:
            shards.append([])
            room = shape.shard_bytes
        room -= nbytes
        total += nbytes
        shards[-1].append((place, name, size))
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: values(place, name, size) for place, name, size in shard}
        save_file(tensors, shape.source / file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (shape.source / "model.safetensors.index.json").write_text(json.dumps(index))
    return {"billions of weights": round(total / 2e9, 3), "GB": round(total / 1e9, 2), "files": len(shards)}


def load(shape: Shape) -> dict[str, Any]:
    """Open it shown, and left on disk: no weight is read into memory."""
    import flodl_hf

    found: dict[str, Any] = {}
    ways: dict[str, dict[str, Any]] = {"shown": {"mapped": True}, "on disk": {"weights": "disk"}}
    for way, given in ways.items():
        start = time.perf_counter()
        model: Any = flodl_hf.load(str(shape.source), **given)
        found[f"{way}, s"] = round(time.perf_counter() - start, 2)
        found["billions of weights"] = round(sum(p.numel() for p in model.parameters()) / 1e9, 3)
        del model
    return found


def answers(shape: Shape) -> dict[str, Any]:
    """Answer on CUDA: seconds until the first answer, then tokens a second."""
    import torch

    import flodl_hf

    start = time.perf_counter()
    model: Any = flodl_hf.load(str(shape.source), mapped=True, device="cuda")
    torch.cuda.synchronize()
    found = {"load s": round(time.perf_counter() - start, 2)}
    model.predict(["the film was good"])
    found["load and first answer, s"] = round(time.perf_counter() - start, 2)
    texts = [" ".join(WORDS[(i + j) % len(WORDS)] for j in range(120)) for i in range(512)]
    tokens = 122 * len(texts)
    model.predict(texts)
    start = time.perf_counter()
    model.predict(texts)
    seconds = time.perf_counter() - start
    found |= {"texts": len(texts), "s": round(seconds, 3), "tokens/s": round(tokens / seconds)}
    return {**found, "GB of the device": round(torch.cuda.max_memory_allocated() / 1e9, 2)}


def whole(shape: Shape) -> dict[str, Any]:
    """Train all weights on one CUDA device: float32 weights and gradients, products in bf16, SGD without momentum.

    AdamW has four numbers for each weight (171 GB of ten billion); this has two (86 GB).
    """
    import torch

    from flodl_hf.training import finetune

    result = finetune(
        shape.source, train=rows(shape.batch), devices="cuda", optimizer="sgd", beta1=0.0, lr=0.1, max_steps=3,
        schedule="constant", precision="bf16", batch_size=shape.batch, max_length=16, dropout=0.0, report=False,
        progress=False,
    )  # fmt: skip
    now = dict(result.model.named_parameters())
    name = next(n for n in now if n.endswith("query.weight"))
    change = (now[name].detach().cpu() - probe(shape.source, 0).float()).abs().max()
    return {
        "losses": result.losses, "recorded": str(result.recorded), "seconds of training": round(result.seconds, 2),
        f"change of {name}": float(change), "GB of the device": round(torch.cuda.max_memory_allocated() / 1e9, 2),
    }  # fmt: skip


def merged(shape: Shape) -> dict[str, Any]:
    """Compare one tensor of each end of the merged folder with the checkpoint's."""
    found = {}
    for layer in (0, shape.layers - 1):
        before, after = probe(shape.source, layer), probe(shape.folder / "merged", layer)
        found[f"layer {layer}: values changed"] = int((before != after).sum())
        found[f"layer {layer}: of"] = before.numel()
    found["files"] = len(list((shape.folder / "merged").glob("*.safetensors")))
    return found


def exported(shape: Shape) -> dict[str, Any]:
    """Compare each file that was exported with the checkpoint's, byte by byte."""
    import filecmp

    names = sorted(path.name for path in shape.source.glob("*.safetensors"))
    other = [n for n in names if not filecmp.cmp(shape.source / n, shape.folder / "exported" / n, shallow=False)]
    return {"files": len(names), "files that differ": other}


def pickled(shape: Shape) -> dict[str, Any]:
    """Turn the checkpoint into one of ``.bin`` files, letting go of each file of the old one."""
    import torch
    from safetensors.torch import load_file

    room = shape.folder / "bin"
    room.mkdir()
    index = json.loads((shape.source / "model.safetensors.index.json").read_text())
    torch.serialization.set_crc32_options(False)

    def renamed(name: str) -> str:
        return name.replace("model-", "pytorch_model-").replace(".safetensors", ".bin")

    for name in sorted(set(index["weight_map"].values())):
        torch.save(load_file(shape.source / name), room / renamed(name))
        (shape.source / name).unlink()
    index["weight_map"] = {tensor: renamed(name) for tensor, name in index["weight_map"].items()}
    (room / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shape.source / name, room / name)
    shutil.rmtree(shape.source)
    return {"files": len(set(index["weight_map"].values()))}


def converted(shape: Shape) -> dict[str, Any]:
    """Load what was converted, and look at one tensor."""
    import torch

    import flodl_hf

    model: Any = flodl_hf.load(str(shape.folder / "converted"), mapped=True)
    last = probe(shape.folder / "converted", shape.layers - 1)
    return {
        "billions of weights": round(sum(p.numel() for p in model.parameters()) / 1e9, 3),
        "dtype": str(last.dtype), "finite": bool(torch.isfinite(last).all()),
        "spread of the last layer": round(float(last.float().std()), 5),
        "files": len(list((shape.folder / "converted").glob("*.safetensors")))
    }  # fmt: skip


FUNCTIONS: dict[str, Callable[[Shape], dict[str, Any]]] = {
    function.__name__: function for function in (write, load, answers, whole, merged, exported, pickled, converted)
}


def probe(folder: Path, layer: int) -> Any:
    """Return one tensor of a folder, read from its file alone."""
    from safetensors import safe_open

    name = PROBE.format(layer)
    index = folder / "model.safetensors.index.json"
    file = json.loads(index.read_text())["weight_map"][name] if index.is_file() else "model.safetensors"
    with safe_open(folder / file, "pt") as opened:
        return opened.get_tensor(name)


def rows(count: int) -> list[dict[str, str]]:
    """Return texts with labels: as many as three steps take."""
    return [
        {"text": " ".join(WORDS[(i + j) % len(WORDS)] for j in range(6)), "label": LABELS[i % 2]}
        for i in range(3 * count)
    ]


# ---- steps: the command of each, and what is looked at after it ----------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        command: of a new process.
        then: a function that looks at what it made, in another.
        removed: folders that go when it was looked at.
        after: folders that are removed before it.
        cuda: it needs a device.
    """

    command: list[str]
    then: str = ""
    removed: tuple[str, ...] = ()
    cuda: bool = False
    threads: int = 0


def steps(shape: Shape, own: list[str]) -> dict[str, Step]:
    """Return all steps by name, in their order."""
    flodl_hf = [sys.executable, "-m", "flodl_hf"]
    source, room = str(shape.source), shape.folder

    def here(name: str) -> list[str]:
        return [sys.executable, "-m", "benchmarks.giant_steps", *own, "--call", name]

    def predict(name: str, *more: str) -> list[str]:
        out = str(room / f"{name}.jsonl")
        return [*flodl_hf, "predict", source, "--in", str(room / "texts.jsonl"), "--out", out, "--overwrite", *more]

    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={shape.ranks}", "-m", "flodl_hf"]

    def tune(out: str, until: int, *more: str) -> list[str]:
        return [
            sys.executable, *launcher, "finetune", source, "--train", str(room / "train.jsonl"),
            "--out", str(room / out), "--devices", shape.device, "--shard", "fsdp", "--lora", "8",
            "--precision", "bf16", "--gradient-checkpointing", "--max-steps", str(until),
            "--batch-size", str(shape.batch), "--max-length", "16", "--lr", "1e-3", "--schedule", "constant",
            "--checkpoints", str(room / "checkpoints"), "--keep-checkpoints", "--no-report", "--json", *more,
        ]  # fmt: skip

    threads = max(1, (os.cpu_count() or 1) // shape.ranks)
    return {
        "write": Step(here("write")),
        "load": Step(here("load")),
        "predict-disk": Step(predict("from-disk", "--weights", "disk", "--device", "cpu")),
        "predict-cuda": Step(predict("from-cuda", "--device", "cuda"), cuda=True),
        "answers-cuda": Step(here("answers"), cuda=True),
        "tune-shards": Step(tune("tuned-1", 2), threads=threads),
        "resume-shards": Step(tune("tuned", 3, "--resume"), threads=threads),
        "export-tuned": Step([*flodl_hf, "export", str(room / "tuned"), "--out", str(room / "adapter"), "--json"]),
        "merge": Step(
            [*flodl_hf, "merge", source, str(room / "tuned"), "--out", str(room / "merged"), "--json"],
            then="merged", removed=("merged",),
        ),
        "tune-whole-cuda": Step(here("whole"), cuda=True),
        "export": Step(
            [*flodl_hf, "export", source, "--out", str(room / "exported"), "--json"],
            then="exported", removed=("exported",),
        ),
        "pickle": Step(here("pickled")),
        "convert": Step(
            [*flodl_hf, "convert", str(room / "bin"), "--out", str(room / "converted"), "--json"], then="converted",
            removed=("bin", "converted"),
        ),
    }  # fmt: skip


class Memory:
    """The most memory of a process and those that it started, by the kinds that the system counts."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.each: dict[str, int] = {"own": 0, "files": 0, "all": 0}
        self.together = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _family(self, pid: int) -> list[int]:
        try:
            below = [
                int(x) for path in Path(f"/proc/{pid}/task").iterdir() for x in (path / "children").read_text().split()
            ]
        except OSError:
            return [pid]
        return [pid, *(one for child in below for one in self._family(child))]

    def _run(self) -> None:
        while not self._over.wait(0.05):
            total = 0
            for pid in self._family(self.pid):
                try:
                    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                except OSError:
                    continue
                found = {x.split(":")[0]: int(x.split()[1]) * 1024 for x in lines if x.startswith("Rss")}
                own = found.get("RssAnon", 0) + found.get("RssShmem", 0)
                files = found.get("RssFile", 0)
                total += own
                for kind, size in (("own", own), ("files", files), ("all", own + files)):
                    self.each[kind] = max(self.each[kind], size)
            self.together = max(self.together, total)

    def gb(self) -> dict[str, float]:
        """Stop looking, and return the most in GB."""
        self._over.set()
        self._thread.join()
        most = {f"{kind} memory of one process, GB": round(size / 1e9, 2) for kind, size in self.each.items()}
        return {**most, "own memory together, GB": round(self.together / 1e9, 2)}


def carry_out(command: list[str], limit_s: float, threads: int) -> dict[str, Any]:
    """Run a command to its end, or to its limit; return what it took, and what it said."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if threads:
        env |= {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=env, start_new_session=True)
        memory = Memory(process.pid)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 15)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
            code = None
        found: dict[str, Any] = {"s": round(time.perf_counter() - start, 2), **memory.gb()}
        out.seek(0)
        err.seek(0)
        said, complained = out.read(), err.read()
    found["ok"] = code == 0
    if code != 0:
        found["failed"] = f"over its {limit_s:.0f} s" if code is None else f"exit code {code}"
        found["last words"] = (complained[-1500:] or said[-1500:]).strip()
    brace = said.find("{")
    if brace >= 0:
        try:
            found["said"] = json.JSONDecoder().raw_decode(said[brace:])[0]
        except ValueError:
            found["said"] = said[-400:]
    rates = [line for line in complained.replace("\r", "\n").splitlines() if "/s" in line or "s/step" in line]
    if rates:
        found["rate"] = rates[-1].strip()[:200]
    return found


def main() -> None:
    """Take the steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where everything is written; made, and removed")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=250_880)
    parser.add_argument("--shard-mb", type=float, default=2000)
    parser.add_argument("--ranks", type=int, default=2, help="processes of the training in shards")
    parser.add_argument("--device", default="cpu", help="where these train: cpu, or cuda with a device for each")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--texts", type=int, default=32, help="texts of predict")
    parser.add_argument("--only", default="", help="steps, comma-separated")
    parser.add_argument("--skip", default="", help="steps to leave out, comma-separated")
    parser.add_argument("--limit-s", type=float, default=240, help="of one step")
    parser.add_argument(
        "--all-s", type=float, default=1e9, help="of all: no step begins after it, and none lasts longer"
    )
    parser.add_argument("--json", type=Path, help="where results are written, after each step")
    parser.add_argument("--keep", action="store_true", help="leave the folder, to go on with --only")
    parser.add_argument("--call", help=argparse.SUPPRESS)
    given = parser.parse_args()
    shape = Shape(
        given.folder.absolute(), given.layers, given.hidden, given.heads, given.vocabulary, int(given.shard_mb * 1e6),
        given.ranks, given.device, given.batch,
    )  # fmt: skip
    if given.call:
        print(json.dumps(FUNCTIONS[given.call](shape)))
        return
    own = [
        f"--folder={shape.folder}", f"--layers={shape.layers}", f"--hidden={shape.hidden}", f"--heads={shape.heads}",
        f"--vocabulary={shape.vocabulary}", f"--shard-mb={given.shard_mb}", f"--ranks={shape.ranks}",
        f"--device={shape.device}", f"--batch={shape.batch}",
    ]  # fmt: skip
    every = steps(shape, own)
    left_out = set(filter(None, given.skip.split(",")))
    wanted = [name for name in (given.only.split(",") if given.only else every) if name not in left_out]
    unknown = [name for name in [*wanted, *left_out] if name not in every]
    if unknown:
        raise SystemExit(f"no step {unknown[0]!r}; there are {', '.join(every)}")
    shape.folder.mkdir(parents=True, exist_ok=True)
    (shape.folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(shape.batch)))
    texts = [row["text"] for row in rows(shape.batch)]
    lines = [json.dumps({"text": texts[i % len(texts)]}) + "\n" for i in range(given.texts)]
    (shape.folder / "texts.jsonl").write_text("".join(lines))
    begun, results = time.perf_counter(), {}
    for name in every:
        if name in wanted:
            results[name] = take(name, every[name], shape, own, begun, given)
            print(f"{name}: {json.dumps(results[name])}", flush=True)
            if given.json:
                given.json.write_text(json.dumps(results, indent=1) + "\n")
    if not given.keep:
        shutil.rmtree(shape.folder, ignore_errors=True)
    print(json.dumps({"seconds": round(time.perf_counter() - begun, 1), "steps": results}, indent=1))


def take(
    name: str, step: Step, shape: Shape, own: list[str], begun: float, given: argparse.Namespace
) -> dict[str, Any]:
    """Take one step, and return its result."""
    left = given.all_s - (time.perf_counter() - begun)
    if left < 5:
        return {"ok": False, "failed": "not begun: no time left"}
    if step.cuda and not _has_cuda():
        return {"ok": False, "failed": "not begun: no CUDA device"}
    try:
        found = carry_out(step.command, min(given.limit_s, left), step.threads)
        if step.then and found["ok"]:
            looked = [sys.executable, "-m", "benchmarks.giant_steps", *own, "--call", step.then]
            left = given.all_s - (time.perf_counter() - begun)
            seen = carry_out(looked, max(5.0, min(given.limit_s, left)), 0)
            found["looked at"] = seen.get("said", seen)
        free = shutil.disk_usage(shape.folder).free
        for folder in step.removed:
            shutil.rmtree(shape.folder / folder, ignore_errors=True)
        return {**found, "disk free at the end, GB": round(free / 1e9, 1)}
    except OSError as fault:
        return {"ok": False, "failed": f"{type(fault).__name__}: {fault}"}


def _has_cuda() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None


if __name__ == "__main__":
    main()
