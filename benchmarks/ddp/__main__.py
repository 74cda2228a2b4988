"""The command line of the measurements on several ranks; see the package."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.ddp import report
from benchmarks.ddp.baseline import BASELINE, compare, read, save
from benchmarks.ddp.cases import CASES, Case, bert
from benchmarks.ddp.curves import equal_curves, weak_scaling
from benchmarks.ddp.data import digits
from benchmarks.ddp.models import small
from benchmarks.ddp.runs import MODES, Bench, table_of_modes
from flodl.distributed import Ranks, join_ranks, launch

QUICK = ("logistic", "mlp", "lenet", "conv-ae", "char-rnn")
"""Models that are trained in minutes."""
PARTS = ("modes", "unequal", "equal", "scaling")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the choices of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ddp",
        description="Training on several ranks, under torchrun or with --ranks, all in one process group.",
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[], help="what to measure; modes if none")
    parser.add_argument("--data", type=Path, help="folder with mnist/ and shakespeare/; made-up data without it")
    parser.add_argument("--out", type=Path, help="folder for results.json, results.md and timelines")
    parser.add_argument("--ranks", type=int, default=1, help="start so many ranks here, where torchrun did not")
    parser.add_argument("--device", help="cpu, or nothing for CUDA devices where there are any")
    parser.add_argument(
        "--models",
        default=",".join(QUICK),
        help=f"for modes; all, or some of {', '.join(CASES)}; those of hours are asked for",
    )
    parser.add_argument(
        "--baseline", type=Path, default=BASELINE, help="file of losses that those of modes are held to"
    )
    parser.add_argument("--save-baseline", action="store_true", help="put the losses of modes into that file")
    parser.add_argument("--tolerance", type=float, default=0.15, help="how far a loss may be from the baseline's")
    parser.add_argument("--unequal-models", default="lenet,bert", help="for unequal")
    parser.add_argument("--modes", default=",".join(MODES), help=f"some of {', '.join(MODES)}")
    parser.add_argument("--seeds", type=int, default=1, help="for modes")
    parser.add_argument("--unequal-seeds", type=int, default=3, help="for unequal")
    parser.add_argument("--epochs", type=int, help="instead of each model's own")
    parser.add_argument("--batch-size", type=int, default=64, help="rows of a batch of each rank")
    parser.add_argument("--slow", default=None, help="RANK:FACTOR, a rank made slower, for modes and unequal")
    parser.add_argument("--nap-ms", type=float, default=0.0, help="sleep in each step; compute that needs no processor")
    parser.add_argument(
        "--lr-scale",
        type=float,
        default=1.0,
        help="modes, unequal: learning rates times 1 + (ranks - 1) times this; 1 is the linear rule of large batches",
    )
    parser.add_argument("--steps", type=int, default=60, help="for equal and scaling")
    parser.add_argument("--precision", default="fp32", help="for scaling and for bert in unequal")
    parser.add_argument("--quick", action="store_true", help="made-up data, one epoch, a tiny BERT")
    args = parser.parse_args(argv)
    models = "" if args.models == "all" else args.models
    known = {"--modes": (args.modes, MODES)}
    known |= {
        name: (names, [*CASES, "bert"])
        for name, names in (("--models", models), ("--unequal-models", args.unequal_models))
    }
    for option, (names, there) in known.items():
        unknown = [name for name in names.split(",") if name and name not in there]
        if unknown:
            parser.error(f"{option}: found {unknown[0]!r}; expected some of {', '.join(there)}, with commas between")
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    if args.ranks > 1:
        start = "fork" if args.device == "cpu" else "spawn"
        found = launch(run, (args,), ranks=args.ranks, device=args.device, start=start).wait()[0]
    else:
        ranks = join_ranks(device=args.device, timeout_s=120)
        found = run(ranks, args)
        ranks.leave()
    return 1 if found is not None and found.get("baseline", {}).get("far") else 0


def run(ranks: Ranks, args: argparse.Namespace) -> dict[str, Any] | None:
    """Measure what was asked for; the first rank prints and writes."""
    began = time.perf_counter()
    results: dict[str, Any] = {"where": _where(ranks), "ranks": ranks.world, "choices": _plain(args)}
    bench = Bench(ranks, args.batch_size, args.nap_ms / 1e3, args.out)
    for part in args.parts or ["modes"]:
        if ranks.world > 1 or part == "modes":
            _say(ranks, f"\n== {part} ({time.perf_counter() - began:.0f} s)")
            results[part] = PART[part](bench, args)
            _write(ranks, args.out, results)
    if ranks.rank == 0 and results.get("modes"):
        results["baseline"] = _held(args, results["modes"])
    results["seconds"] = time.perf_counter() - began
    _say(ranks, f"\n{_markdown(results)}\n({results['seconds']:.0f} s)")
    _write(ranks, args.out, results)
    return results if ranks.rank == 0 else None


def _held(args: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Hold losses to the baseline, or put them into it; say what is far from it."""
    if args.save_baseline:
        save(args.baseline, rows)
        print(f"\nlosses written to {args.baseline}")
    far, strange = compare(rows, read(args.baseline), args.tolerance)
    print(f"\n{len(rows) - len(far) - len(strange)} losses as in the baseline, {len(strange)} that it does not have")
    for line in far:
        print(f"FAR FROM THE BASELINE  {line}")
    return {"far": far, "unknown": strange}


def _modes(args: argparse.Namespace, ranks: Ranks) -> list[str]:
    wanted = args.modes.split(",")
    # Without a GPU there is no NCCL, and alone there is nobody to average with.
    return [
        mode
        for mode in wanted
        if mode == "solo" or (not ranks.solo and (ranks.device.type == "cuda" or not mode.startswith("nccl")))
    ]


def _cases(args: argparse.Namespace, names: str) -> list[Case]:
    large = {"rows": 192, "tiny": True, "seq": 16} if args.quick else {"rows": 4096}
    names = ",".join(CASES) if names == "all" else names
    return [bert(**large) if name == "bert" else CASES[name] for name in names.split(",")]


def _slow(args: argparse.Namespace, default: dict[int, float]) -> dict[int, float]:
    if not args.slow:
        return default
    rank, _, factor = args.slow.partition(":")
    return {int(rank): float(factor)}


def part_modes(bench: Bench, args: argparse.Namespace) -> Any:
    """All modes on equal ranks, or with the slow rank that was asked for."""
    return table_of_modes(
        bench, _cases(args, args.models), _folder(args), modes=_modes(args, bench.ranks), seeds=args.seeds,
        slow=_slow(args, {}), **_more(args),
    )  # fmt: skip


def part_unequal(bench: Bench, args: argparse.Namespace) -> Any:
    """Cadence and Async with the last rank 2.5 times as slow, against the first rank alone."""
    modes = [mode for mode in _modes(args, bench.ranks) if not mode.endswith("-sync")]
    slow = _slow(args, {bench.ranks.world - 1: 2.5})
    rows, cuda = [], bench.ranks.device.type == "cuda"
    for case in _cases(args, args.unequal_models):
        large = case.name == "bert"
        more = {**_more(args), **({"precision": args.precision} if large else {})}
        # hundreds of megabytes through host memory take longer than these short runs
        wanted = [mode for mode in modes if not (large and cuda and mode.startswith("cpu"))]
        own = Bench(bench.ranks, 32 if large and not args.quick else bench.batch, bench.nap_s, bench.out)
        seeds = 1 if large else args.unequal_seeds
        rows += table_of_modes(own, [case], _folder(args), modes=wanted, seeds=seeds, slow=slow, name="unequal", **more)
    return rows


def part_equal(bench: Bench, args: argparse.Namespace) -> Any:
    """Loss curves of Sync and of one rank, with the same global batch in float32."""
    rows = []
    for case in _two(args):
        batch = 64 if case.name == "small" else 32
        rows.append(equal_curves(bench, case, case.data(_folder(args)), steps=args.steps, batch=batch))
        _say(bench.ranks, str(rows[-1]))
    return rows


def part_scaling(bench: Bench, args: argparse.Namespace) -> Any:
    """Samples per second with the same batch on each rank."""
    rows: list[dict[str, Any]] = []
    for case in _two(args):
        batch = 512 if case.name == "small" and not args.quick else 32
        steps = args.steps * 4 if case.name == "small" and not args.quick else args.steps * 2 // 3
        for precision in dict.fromkeys(("fp32", args.precision)):
            rows += weak_scaling(
                bench, case, case.data(_folder(args)), steps=steps, batch=batch, precision=precision
            )  # fmt: skip
            _say(bench.ranks, "\n".join(str(row) for row in rows[-2:]))
    return rows


PART = {"modes": part_modes, "unequal": part_unequal, "equal": part_equal, "scaling": part_scaling}


def _two(args: argparse.Namespace) -> list[Case]:
    mlp = CASES["mlp"]
    return [Case("small", small, mlp.optimizer, mlp.step, digits, 1, None), *_cases(args, "bert")]


def _folder(args: argparse.Namespace) -> Path | None:
    return None if args.quick else args.data


def _more(args: argparse.Namespace) -> dict[str, Any]:
    epochs = 1 if args.quick else args.epochs
    return {"lr_scale_ratio": args.lr_scale, **({"num_epochs": epochs} if epochs else {})}


def _where(ranks: Ranks) -> dict[str, Any]:
    cuda = ranks.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(ranks.device)
        if cuda
        else f"CPU, {torch.get_num_threads()} threads a rank",
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _plain(args: argparse.Namespace) -> dict[str, Any]:
    return {k: v for k, v in vars(args).items() if k not in ("data", "out", "baseline")}


def _markdown(results: dict[str, Any]) -> str:
    said = [f"{k}: {v}" for k, v in results["where"].items() if v]
    tables = {"modes": report.modes, "unequal": report.modes, "equal": report.curves, "scaling": report.scaling}
    parts = [f"{results['ranks']} ranks, " + ", ".join(said)]
    parts += [f"## {name}\n\n{tables[name](results[name])}" for name in tables if results.get(name)]
    return "\n\n".join(parts)


def _write(ranks: Ranks, out: Path | None, results: dict[str, Any]) -> None:
    if ranks.rank or out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "results.md").write_text(_markdown(results) + "\n")


def _say(ranks: Ranks, line: str) -> None:
    if ranks.rank == 0:
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
