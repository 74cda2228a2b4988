"""Memory that large checkpoints take while they are loaded and while they answer: held, shown, and read layer by layer.

    python benchmarks/giants.py [--layers 5] [--hidden 2560] [--folder DIR]

Makes a sharded folder of an XLM-RoBERTa-XL with random weights, which is removed again, and runs each way in a process
of its own, interleaved. Memory is the most that the process held above what it had before loading, by the kind that
the system counts: its own, and pages of files.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

WAYS = {
    "held": {"weights": "memory"},
    "held, bf16": {"weights": "memory", "dtype": "bfloat16"},
    "shown": {"weights": "memory", "mapped": True},
    "on disk": {"weights": "disk"},
}
TEXTS = ["the film was good", "is this a long text about a film", "bad"] * 8


def make(folder: Path, hidden: int, layers: int, shard: str) -> None:
    """Write the folder."""
    import torch

    from flodl_hf import AutoModel
    from flodl_hf.checkpoints.config.model_config import ModelConfig
    from flodl_hf.training.demo import train_wordpiece

    config = ModelConfig.for_model(
        "xlm-roberta-xl", vocab_size=1000, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=32,
        intermediate_size=4 * hidden, max_position_embeddings=130, type_vocab_size=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModel.from_config(config, pooler=False)
    model.tokenizer = train_wordpiece(TEXTS, vocab_size=200)
    model._mark_untrained(())
    model.save_pretrained(folder, max_shard_size=shard)


class Watch:
    """The most memory of this process, by kind, sampled by a thread."""

    def __init__(self) -> None:
        self.before = self._now()
        self.most = dict(self.before)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _now(self) -> dict[str, int]:
        lines = Path("/proc/self/status").read_text().splitlines()
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss")}
        return {"own": found["RssAnon"], "files": found["RssFile"], "all": found["RssAnon"] + found["RssFile"]}

    def _run(self) -> None:
        while not self._over.wait(0.002):
            for kind, size in self._now().items():
                self.most[kind] = max(self.most[kind], size)

    def mb(self) -> dict[str, int]:
        """Return what was taken since the beginning, in MB."""
        return {kind: round((self.most[kind] - self.before[kind]) / 1e6) for kind in self.most}


def measure(folder: str, way: str) -> None:
    """Print what one way takes."""
    import numpy as np
    import torch

    import flodl_hf

    assert callable(flodl_hf.load)  # what is imported is not counted
    torch.mm(torch.zeros(64, 64), torch.zeros(64, 64))
    watch, start = Watch(), time.perf_counter()
    model: Any = flodl_hf.load(folder, **WAYS[way])
    loaded, load_s = watch.mb(), time.perf_counter() - start
    start = time.perf_counter()
    vectors = model.embed(TEXTS)
    answered, answer_s = watch.mb(), time.perf_counter() - start
    sums = float(np.asarray(vectors, np.float64).sum())
    print(json.dumps([loaded, load_s, answered, answer_s, sums]))


def main() -> None:
    """Make the folder and measure all ways."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument("--shard", default="400MB")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--measure", nargs=2)
    given = parser.parse_args()
    if given.measure:
        measure(*given.measure)
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as room:
        folder = Path(room) / "giant"
        make(folder, given.hidden, given.layers, given.shard)
        sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
        print(f"{len(sizes)} files, {sum(sizes) / 1e6:,.0f} MB, {given.layers} layers")
        head = f"{'files':>7} {'all':>7} {'s':>6}"
        print(f"{'MB':12} {'load: own':>10} {head} | {'answer: own':>12} {head}")
        for _ in range(given.rounds):
            for way in WAYS:
                command = [sys.executable, __file__, "--measure", str(folder), way]
                said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                loaded, load_s, answered, answer_s, sums = json.loads(said.splitlines()[-1])
                print(
                    f"{way:12} {loaded['own']:>10,} {loaded['files']:>7,} {loaded['all']:>7,} {load_s:>6.2f} | "
                    f"{answered['own']:>12,} {answered['files']:>7,} {answered['all']:>7,} {answer_s:>6.2f}  {sums:.9g}"
                )


if __name__ == "__main__":
    main()
