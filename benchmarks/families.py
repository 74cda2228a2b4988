"""Tokens a second of each family at base size, beside transformers' model by hand, and the share of the device's peak.

Weights are random at real sizes, tokens too; rows have the log-normal lengths of mixed texts (median 32, at most 512).
Ours is the engine that ``embed`` uses, from tables of tokens to mean vectors; theirs is transformers' model with
PyTorch's fused attention, rows sorted, batches of at most 32,768 tokens with padding, mean pooling. Neither tokenises.
Tokens count without padding. The share is what the projections of the layers take (two operations a weight and token,
attention itself left out), of a product of large matrices measured in the same process.

    python -m benchmarks.families [--only bert modernbert ...] [--rows 20000] [--device cuda:0] [--precision bf16]
        [--length 0] [--seconds 120] [--json FILE]

``--length 8192`` has all rows of one length instead. ``--seconds`` begins no further family after so many.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flodl_hf.auto import head_named
from flodl_hf.decode.rows import TokenTable
from flodl_hf.families import families
from flodl_hf.parity.cell import Cell
from flodl_hf.parity.reference import load_reference, make_checkpoint
from flodl_hf.parity.shapes import settings_of
from flodl_hf.runtime.engine import Engine
from flodl_hf.runtime.options import RunOptions
from flodl_hf.runtime.passes import Pooled
from flodl_hf.serving.peak import operations_of_token, peak_of

BUDGET = 32_768
ROUNDS = 3
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
        if batches[-1] and (len(batches[-1]) + 1) * int(table.lengths[batches[-1][0]]) > BUDGET:
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


def measured(family: Any, args: argparse.Namespace, device: torch.device, peak: float) -> dict[str, Any]:
    """Return the figures of one family."""
    dtype = DTYPES[args.precision]
    settings = settings_of(family, "real")
    with tempfile.TemporaryDirectory() as place:
        architecture = Cell(family.model_type, "base").architecture
        folder = make_checkpoint(Path(place) / "model", architecture, settings)
        ours: Any = head_named("base").model.from_pretrained(folder, device=str(device))
        theirs = load_reference(folder, architecture, attention=args.attention, dtype=dtype).model.to(device)
    longest = min(ours.max_tokens or 512, 512)
    lengths = np.full(args.rows, args.length) if args.length else lengths_of(args.rows, longest)
    table = table_of(lengths, ours.config.vocab_size)
    engine = Engine.of(ours.eval(), RunOptions(precision=args.precision, progress=False))
    tokens = int(lengths.sum())
    own = timed(lambda: engine.start(table, Pooled(("mean",))).stacked(), device)
    try:
        other = timed(by_hand(theirs, table, device), device)
    except RuntimeError as fault:  # DeBERTa's of transformers 5.17 mixes its dtypes in half precision
        print(f"transformers' {family.model_type}: {str(fault)[:160]}", flush=True)
        other = float("nan")
    return {
        "family": family.model_type,
        "tokens_per_s": tokens / own,
        "transformers_tokens_per_s": tokens / other,
        "share_of_peak": tokens / own * operations_of_token(ours) / peak,
    }


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
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    began, rows = time.perf_counter(), []
    peak = peak_of(device, DTYPES[args.precision])
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "processor"
    print(f"{name}, torch {torch.__version__}, {args.precision}, peak {peak / 1e12:.0f} Tera-operations/s", flush=True)
    for family in families():
        if not family.real or (args.only and family.model_type not in args.only):
            continue
        if time.perf_counter() - began > args.seconds:
            print(f"{args.seconds:.0f} s are over", flush=True)
            break
        try:
            found = measured(family, args, device, peak)
        except Exception as fault:  # one family that fails takes no other along
            print(f"{family.model_type:22} {type(fault).__name__}: {str(fault)[:200]}", flush=True)
            continue
        rows.append(found)
        ratio = found["tokens_per_s"] / found["transformers_tokens_per_s"]
        print(
            f"{found['family']:22} {found['tokens_per_s'] / 1e3:10,.0f} ktok/s {found['share_of_peak']:6.1%} of peak, "
            f"transformers {found['transformers_tokens_per_s'] / 1e3:8,.0f} ({ratio:.1f}x)",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
