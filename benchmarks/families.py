"""Tokens a second of each family at base size, beside transformers' model by hand, and the share of the device's peak.

Weights are random at real sizes, tokens too; rows have the log-normal lengths of mixed texts (median 32, at most
512). Ours is the engine that ``embed`` uses, from tables of tokens to mean vectors; theirs is transformers' model
with PyTorch's fused attention, rows sorted, batches of at most 32,768 tokens with padding (1,024 on a processor),
mean pooling. Neither tokenises. Tokens count without padding. The share is what the projections of the layers take
(two operations a weight and token, attention itself left out), of a product of large matrices measured in the same
process. A family that the installed transformers lacks, or cannot run so, has a figure without a peer, and the reason
is said.

    python -m benchmarks.families --device cpu --precision fp32 --rows 24       # on a processor: some 20 s a family
    python -m benchmarks.families [--only bert modernbert ...] [--rows 20000] [--device cuda:0] [--precision bf16]
        [--length 0] [--seconds 120] [--json docs/families_measured.json] [--hardware "one H200"]

``--length 8192`` has all rows of one length instead. ``--seconds`` begins no further family after so many. ``--json``
puts the figures into a file in place of those that it had of the same families, length and kind of device; from
`docs/families_measured.json` the tables of the documents are written (`make docs`).
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flodl.files import write_atomically
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.families import families
from flodl_hf.heads.auto import head_named
from flodl_hf.inference.batch import Pooled
from flodl_hf.inference.engine import Engine
from flodl_hf.inference.options import RunOptions
from flodl_hf.inference.token_table import TokenTable
from flodl_hf.parity.cell import Cell, settings_of
from flodl_hf.parity.reference import load_reference, make_checkpoint
from flodl_hf.serving.tasks import measure_peak, operations_of_token

# Tokens of a batch of theirs, padding included; what fits into a processor's caches is faster there.
BUDGET = {"cuda": 32_768, "cpu": 1_024}
ROUNDS = 3
# Sizes of files that transformers has no class for, as published; other families state theirs.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "jina_bert": (
        "bert",
        {
            "position_embedding_type": "alibi", "feed_forward_type": "geglu", "vocab_size": 30528, "hidden_size": 768,
            "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072, "type_vocab_size": 2,
            "max_position_embeddings": 8192,
        },
    )
}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def lengths_of(rows: int, longest: int) -> np.ndarray[Any, Any]:
    """Return lengths as mixed texts have them."""
    draw = np.random.default_rng(0)
    return np.clip(np.round(draw.lognormal(np.log(32), 0.9, rows)), 4, longest).astype(np.int64)


def table_of(lengths: np.ndarray[Any, Any], vocabulary: int) -> TokenTable:
    """Return rows of random tokens."""
    count, rows = int(lengths.sum()), len(lengths)
    ids = np.random.default_rng(1).integers(5, min(vocabulary, 30_000), count)
    none = np.zeros(rows, np.int64)
    return TokenTable(
        ids, None, lengths, np.arange(rows), lengths, none, none, np.zeros(count, np.int8), None, None, none
    )


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of a few rounds after two that warm up."""
    seconds = []
    for turn in range(2 + ROUNDS):
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn >= 2:
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def by_hand(model: Any, table: TokenTable, device: torch.device) -> Callable[[], object]:
    """Return what runs transformers' model over all rows."""
    order = np.argsort(-table.lengths, kind="stable")
    starts = np.cumsum(table.lengths) - table.lengths
    batches: list[list[int]] = [[]]
    for row in order.tolist():
        if batches[-1] and (len(batches[-1]) + 1) * int(table.lengths[batches[-1][0]]) > BUDGET[device.type]:
            batches.append([])
        batches[-1].append(row)

    def run() -> Tensor:
        found = []
        for rows in batches:
            longest = int(table.lengths[rows[0]])
            ids = torch.full((len(rows), longest), 1)
            mask = torch.zeros(len(rows), longest, dtype=torch.int64)
            for i, row in enumerate(rows):
                length = int(table.lengths[row])
                ids[i, :length] = torch.from_numpy(table.ids[starts[row] : starts[row] + length])
                mask[i, :length] = 1
            ids, mask = ids.to(device), mask.to(device)
            states = model(input_ids=ids, attention_mask=mask).last_hidden_state
            weights = mask[..., None].to(states.dtype)
            found.append(((states * weights).sum(1) / weights.sum(1)).float())
        return torch.cat(found).cpu()

    return torch.inference_mode()(run)


def peer_of(model_type: str, settings: Mapping[str, Any], attention: str, dtype: torch.dtype) -> Any:
    """Return transformers' model of these sizes, with random weights."""
    architecture = Cell(model_type, "base").architecture
    with tempfile.TemporaryDirectory() as place:
        folder = make_checkpoint(Path(place) / "model", architecture, settings)
        return load_reference(folder, architecture, attention=attention, dtype=dtype).model


def measured(model_type: str, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the figures of one family; ``lacking`` says why there is no peer.

    The device's peak is measured before and after ours and the better taken: a shared machine changes within minutes.
    """
    dtype = DTYPES[args.precision]
    if model_type in PUBLISHED:
        stored, settings = PUBLISHED[model_type]
    else:
        stored, settings = model_type, settings_of(next(f for f in families() if f.model_type == model_type), "real")
    torch.manual_seed(0)
    ours: Any = head_named("base").model.from_config(ModelConfig.for_model(stored, **settings)).to(device)
    longest = min(ours.max_tokens or 512, 512)
    lengths = np.full(args.rows, args.length) if args.length else lengths_of(args.rows, longest)
    table = table_of(lengths, ours.config.vocab_size)
    engine = Engine.of(ours.eval(), RunOptions(precision=args.precision, progress=False))
    tokens = int(lengths.sum())
    peak = measure_peak(device, dtype)
    own = timed(lambda: engine.start(table, Pooled(("mean",))).stacked(), device)
    peak = max(peak, measure_peak(device, dtype))
    other, lacking = None, None
    if model_type in PUBLISHED:
        lacking = "transformers has no class for such files"
    else:
        try:
            theirs = peer_of(model_type, settings, args.attention, dtype).to(device)
            other = timed(by_hand(theirs, table, device), device)
        except (
            AttributeError,
            RuntimeError,
        ) as fault:  # no such class; dtypes mixed in half precision; too little memory
            lacking = str(fault).splitlines()[0][:160]
    return {
        "family": model_type,
        "length": args.length,
        "tokens_per_s": tokens / own,
        "transformers_tokens_per_s": None if other is None else tokens / other,
        "lacking": lacking,
        "peak": peak,
        "share_of_peak": tokens / own * operations_of_token(ours) / peak,
    }


def put_in(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows into a file, in place of those of the same families, length and kind of device."""
    known = json.loads(path.read_text("utf-8")) if path.exists() else []
    held = {(row["family"], row["length"], row["kind"]): row for row in [*known, *rows]}
    write_atomically(path, [(json.dumps(list(held.values()), indent=1) + "\n").encode()])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--length", type=int, default=0)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--precision", choices=list(DTYPES), default="bf16")
    parser.add_argument("--attention", default="sdpa", help="of transformers' model")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hardware", help="what the device is called in the file")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    began, rows = time.perf_counter(), []
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "processor"
    print(f"{name}, torch {torch.__version__}, {args.precision}", flush=True)
    names = [family.model_type for family in families() if family.real] + list(PUBLISHED)
    about = {
        "device": args.hardware or name, "kind": device.type, "torch": torch.__version__, "precision": args.precision,
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    for model_type in names:
        if args.only and model_type not in args.only:
            continue
        if time.perf_counter() - began > args.seconds:
            print(f"{args.seconds:.0f} s are over", flush=True)
            break
        try:
            found = measured(model_type, args, device)
        except Exception as fault:  # one family that fails takes no other along
            print(f"{model_type:22} {type(fault).__name__}: {str(fault)[:200]}", flush=True)
            continue
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        rows.append(found | about)
        own, other = found["tokens_per_s"], found["transformers_tokens_per_s"]
        scale, unit = (1e3, "ktok/s") if device.type == "cuda" else (1, "tokens/s")
        peer = (
            f"no peer: {found['lacking']}"
            if other is None
            else f"transformers {other / scale:8,.0f} ({own / other:.1f}x)"
        )
        print(f"{model_type:22} {own / scale:10,.0f} {unit} {found['share_of_peak']:6.1%} of peak, {peer}", flush=True)
    if args.json:
        put_in(args.json, rows)


if __name__ == "__main__":
    main()
