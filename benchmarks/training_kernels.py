"""Kernels of a training step on one CUDA device, by how they are cut: microseconds, and how far from torch's results.

    python -m benchmarks.training_kernels [--only sums,norm,attention,attention_backward] [--rounds 9] [--workers 12]

What is timed is a recorded graph of 50 calls, over data sets in turn so that not all is in the device's cache; the
figure is the median over replays. Distances are relative (2-norm) from the same in float32 by torch, for attention with
dropout from the first variant, whose distance without dropout comes first. ``same`` says whether a second run gives
equal bits. Each variant is compiled beforehand by processes of their own, unless ``--workers 0``.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flodl.train.step import decide
from flodl_hf.nn.attention import attend
from flodl_hf.nn.buckets import Buffer, bucket_of
from flodl_hf.nn.layout import Packed

HEADS, WIDTH, DROPOUT = 12, 64, 0.1
CALLS = 50
Run = Callable[[], list[Tensor]]


@contextlib.contextmanager
def cut(module: Any, **values: Any) -> Iterator[None]:
    """Have a module's constants be others for a while."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def microseconds(runs: Sequence[Run], rounds: int) -> float:
    """Return the time of a call, from replays of a recorded graph of many."""
    for run in runs:
        run()
    graph = torch.cuda.CUDAGraph()
    # Gradients run on the stream that the results were computed on, which is this one.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for at in range(CALLS):
            runs[at % len(runs)]()
    times = []
    for _ in range(rounds + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return median(times[2:])


def distance(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Return the largest relative distance."""
    return max(
        float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-9))
        for a, b in zip(found, right, strict=True)
    )


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return random numbers on the device."""
    return torch.randn(*shape, device="cuda", dtype=dtype)


@dataclass(frozen=True)
class Part:
    """One kernel: its sizes, its variants, and what runs a variant at a size.

    Attributes:
        sizes: by name.
        variants: by name; the first is what ran before.
        make: takes a size and gives data sets and the right result of the first.
        run: takes a variant and a data set.
        kinds: sizes for which kernels are compiled apart; None for the first.
    """

    sizes: dict[str, Any]
    variants: dict[str, Any]
    make: Callable[[Any], tuple[list[Any], list[Tensor] | None]]
    run: Callable[[Any, Any], list[Tensor]]
    kinds: tuple[int, ...] = (0,)


def _sums() -> Part:
    from flodl_hf.nn.kernels import operations

    def make(size: tuple[int, int, bool]) -> tuple[list[Any], list[Tensor]]:
        tokens, width, gelu = size
        sets = [(drawn(tokens, width), drawn(tokens, width) if gelu else None) for _ in range(4)]
        grad, x = sets[0]
        if x is None:
            return sets, [grad.double().sum(0)]
        wide = x.double().requires_grad_()
        (d_x,) = torch.autograd.grad(F.gelu(wide), wide, grad.double())
        return sets, [d_x, d_x.sum(0)]

    def run(variant: tuple[int, ...], data: Any) -> list[Tensor]:
        grad, x = data
        stripes = operations.Stripes(*variant)
        with cut(operations, FEW=stripes, MANY=stripes, CURVED=stripes):
            d_x, sums = operations._sums(grad, x, False)
        return [sums] if x is None else [d_x, sums]

    sizes = [(1792, 2304, False), (3584, 2304, False), (1792, 768, False), (1792, 3072, True), (3584, 3072, True)]
    sizes += [(8192, 2304, False), (8192, 4096, True)]
    tried = [(16, 128, 4, 16), (256, 16, 8, 0), (128, 16, 8, 0), (512, 16, 16, 0), (256, 16, 8, 2), (128, 16, 8, 4)]
    tried += [(256, 32, 8, 0), (256, 32, 8, 2), (128, 32, 8, 4), (64, 64, 8, 4), (32, 128, 8, 4), (32, 64, 4, 8)]
    return Part({_named(s): s for s in sizes}, {_named(v): v for v in tried}, make, run, (0, 3))


def _norms(backward: bool) -> Part:
    from flodl_hf.nn.kernels import operations

    def norm(given: list[Tensor], x_bias: Tensor | None, seed: Tensor) -> tuple[Tensor, Tensor]:
        x, residual, weight, bias = given
        return operations.added_and_normed(x, residual, weight, bias, x_bias, seed, eps=1e-5, p=DROPOUT, stream=3)

    def make(size: tuple[int, int]) -> tuple[list[Any], list[Tensor]]:
        tokens, width = size
        seed = torch.tensor([5], device="cuda")
        weight, bias, x_bias = (drawn(width, dtype=torch.float32).requires_grad_() for _ in range(3))
        sets = []
        for _ in range(3):
            x, residual = drawn(tokens, width).requires_grad_(), drawn(tokens, width, dtype=torch.float32)
            grads = [drawn(tokens, width, dtype=torch.float32), drawn(tokens, width)]
            sets.append(([x, residual.requires_grad_(), weight, bias], x_bias, grads, seed, {}))
        given, _, grads, *_ = sets[0]
        wide = [t.detach().double().requires_grad_() for t in given]
        # What is dropped is read from the gradient that the first variant gives.
        with torch.enable_grad():
            found = norm(given, x_bias, seed)
            kept = torch.autograd.grad(found, given[0], grads)[0] != 0
            total = wide[0] * kept / (1 - DROPOUT) + wide[1]
            right = F.layer_norm(total, (width,), wide[2], wide[3], 1e-5)
            if not backward:
                return sets, [right.detach()] * 2
            theirs = list(torch.autograd.grad(right, wide, grads[0].double() + grads[1].double()))
        return sets, [*theirs, theirs[0].sum(0)]

    def run(variant: Any, data: Any) -> list[Tensor]:
        given, x_bias, grads, seed, kept = data
        if not backward:
            with cut(operations, NORM_WARPS=variant):
                return list(norm([t.detach() for t in given], None, seed))
        if "found" not in kept:
            kept["found"] = norm(given, x_bias, seed)
        with cut(operations, NORM_BACKWARD=variant):
            return list(torch.autograd.grad(kept["found"], [*given, x_bias], grads, retain_graph=True))

    sizes = [(1792, 768), (3584, 768), (8192, 768), (8192, 1024)]
    if not backward:
        return Part({_named(s): s for s in sizes}, {f"{w} warps": w for w in (2, 1, 4, 8)}, make, run, (0, 3))
    tried = [(8, 4), (8, 2), (8, 3), (8, 6), (4, 4), (4, 6), (4, 8)]
    return Part({_named(s): s for s in sizes}, {_named(v): v for v in tried}, make, run, (0, 3))


def _activate() -> Part:
    from flodl_hf.nn.kernels import operations

    def make(size: tuple[int, int]) -> tuple[list[Any], list[Tensor]]:
        sets = [drawn(*size) for _ in range(4)]
        return sets, [F.gelu(sets[0].double())]

    def run(variant: tuple[int, int], data: Tensor) -> list[Tensor]:
        with cut(operations, ACTIVATE=variant):
            return [operations.activated(data, None, tanh=False)]

    sizes = [(1792, 3072), (3584, 3072), (8192, 3072)]
    tried = [(2048, 4), (1024, 4), (4096, 4), (4096, 8), (2048, 8), (8192, 8)]
    return Part({_named(s): s for s in sizes}, {_named(v): v for v in tried}, make, run)


def _squares() -> Part:
    def make(size: int) -> tuple[list[Any], list[Tensor]]:
        shapes = [(30522, 768), (512, 768), (2, 768), (768,), (768,)]
        shapes += [(768, 768), (768,)] * 4 * size + [(3072, 768), (3072,), (768, 3072), (768,)] * size
        shapes += [(768,)] * 4 * size + [(768, 768), (768,), (2, 768), (2,)]
        grads = [drawn(*shape, dtype=torch.float32) for shape in shapes]
        right = torch.stack([g.double().square().sum() for g in grads]).sum()
        return [(grads, {})], [right[None]]

    def run(variant: tuple[int, int, int], data: Any) -> list[Tensor]:
        (grads, laid), (block, warps, most) = data, variant
        if variant not in laid:
            with cut(decide, BLOCK=block):
                layout = decide.BlockLayout.of(tuple(g.numel() for g in grads), torch.device("cuda"), most)
            laid[variant] = layout, torch.tensor([g.data_ptr() for g in grads], device="cuda")
        layout, table = laid[variant]
        sums = torch.empty(layout.which.numel(), dtype=torch.float32, device="cuda")
        kernels = decide.load_kernels()
        kernels.square_sums[(len(sums),)](
            table, layout.sizes, layout.which, layout.starts, sums, layout.span, kernels.tl.float32, block,
            num_warps=warps,
        )  # fmt: skip
        return [sums]

    most = decide.MOST_PROGRAMS
    tried = [(decide.BLOCK, decide.WARPS, most)]
    tried += [(b, w, m) for b, w in ((2048, 4), (4096, 8), (1024, 4), (4096, 4)) for m in (most, 2 * most, 4 * most)]
    return Part({"BERT-base, 110 million": 12}, {_named(v): v for v in dict.fromkeys(tried)}, make, run)


def _copies() -> Part:
    from flodl_hf.nn.kernels import copies

    def make(width: int) -> tuple[list[Any], list[Tensor]]:
        shapes = [(width, width)] * 3 + [(width,)] * 3 + [(width, width), (width,), (4 * width, width), (4 * width,)]
        shapes += [(width, 4 * width), (width,)]
        sets = [[drawn(*shape, dtype=torch.float32) for shape in shapes] for _ in range(4)]
        return sets, [torch.cat([t.flatten() for t in sets[0]]).to(torch.bfloat16)]

    def run(variant: tuple[int, int] | None, data: list[Tensor]) -> list[Tensor]:
        if variant is None:
            room = torch.empty(sum(t.numel() for t in data), dtype=torch.bfloat16, device="cuda")
            pieces = [p.view_as(t) for p, t in zip(room.split([t.numel() for t in data]), data, strict=True)]
            torch._foreach_copy_(pieces, data)  # pyright: ignore[reportPrivateImportUsage]
            return [room]
        with cut(copies, BLOCK=variant[0], WARPS=variant[1]):
            return [copies.copied(data, torch.bfloat16)]

    tried = [(4096, 4), (2048, 4), (8192, 8), (8192, 4), (4096, 8), (16384, 8)]
    sizes = {"a layer of BERT-base": 768, "a layer of BERT-large": 1024}
    return Part(sizes, {"torch": None} | {_named(v): v for v in tried}, make, run, (0, 1))


def _lengths(texts: int, middle: float, longest: int) -> np.ndarray:
    draw = np.random.default_rng(0).normal(np.log(middle), 0.75, texts)
    found = np.clip(np.exp(draw), 3, longest).astype(np.int64)
    found[texts // 2] = longest
    return found


def _attention(backward: bool) -> Part:
    from flodl_hf.nn.kernels import operations

    def make(lengths: np.ndarray) -> tuple[list[Any], list[Tensor] | None]:
        buffer = Buffer(bucket_of(lengths))
        buffer.write(np.zeros(int(lengths.sum()), np.int32), None, lengths)
        layout = buffer.on(buffer.packed.cuda())[2]
        sets = []
        seed = torch.full((1,), 5, device="cuda")
        for _ in range(3):
            qkv = drawn(buffer.bucket.tokens, 3 * HEADS * WIDTH).requires_grad_()
            sets.append((qkv, drawn(buffer.bucket.tokens, HEADS * WIDTH), (layout, seed), {}))
        qkv, direction, *_ = sets[0]
        inside = int(lengths.sum())
        plain = Packed.of(lengths.tolist(), "cuda")
        wide = qkv[:inside].detach().float().requires_grad_()
        query, key, value = wide.chunk(3, 1)
        whole = attend(query, key, value, plain, num_heads=HEADS, implementation="eager")
        (theirs,) = torch.autograd.grad(whole, wide, direction[:inside].float())
        mine = ours(qkv, (layout, seed), 0.0)
        (grad,) = torch.autograd.grad(mine, qkv, direction)
        far = distance([mine[:inside]], [whole]), distance(grad[:inside].chunk(3, 1), theirs.chunk(3, 1))
        print("    without dropout: {:.1e}, gradients {:.1e}".format(*far))
        return sets, None

    def ours(qkv: Tensor, about: Any, p: float) -> Tensor:
        layout, seed = about
        return operations.mixed(qkv, layout.places, layout.segment_ends(), seed, heads=HEADS, p=p, stream=7)

    def mix(variant: Any, qkv: Tensor, about: Any) -> Tensor:
        if variant is None:
            query, key, value = qkv.chunk(3, 1)
            return attend(query, key, value, about[0], num_heads=HEADS, dropout=DROPOUT)
        return ours(qkv, about, DROPOUT)

    def run(variant: Any, data: Any) -> list[Tensor]:
        qkv, direction, about, kept = data
        if not backward:
            with cut(operations, FORWARD=variant) if variant else contextlib.nullcontext():
                return [mix(variant, qkv.detach(), about)]
        key = "torch" if variant is None else "ours"
        if key not in kept:
            kept[key] = mix(variant, qkv, about)
        with cut(operations, BACKWARD=variant) if variant else contextlib.nullcontext():
            return list(torch.autograd.grad(kept[key], qkv, direction, retain_graph=True))

    sizes = {
        "32 texts, mean 56, to 190": _lengths(32, 42, 190), "64 texts, mean 56, to 190": _lengths(64, 42, 190),
        "32 texts, mean 150, to 512": _lengths(32, 115, 512), "64 of 128": np.full(64, 128),
        "32 of 256": np.full(32, 256), "16 of 512": np.full(16, 512),
    }  # fmt: skip
    tiles = [(64, 32, 4, 3), (64, 32, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2), (32, 32, 4, 3), (32, 32, 2, 3)]
    variants: dict[str, Any] = {"torch": None}
    tiles += [(64, 32, 8, 2), (64, 64, 8, 2)] if backward else [(64, 128, 4, 2), (128, 32, 8, 3)]
    tiles += [(128, 64, 8, 2)]
    variants |= {_named(t): operations.Tiles(*t) for t in tiles}
    return Part(sizes, variants, make, run)


def _named(numbers: Sequence[Any]) -> str:
    return " ".join("gelu" if n is True else "" if n is False else str(n) for n in numbers).strip()


PARTS: dict[str, Callable[[], Part]] = {
    "attention_backward": lambda: _attention(True), "attention": lambda: _attention(False),
    "norm_backward": lambda: _norms(True), "sums": _sums, "copies": _copies, "norm": lambda: _norms(False),
    "activate": _activate, "squares": _squares,
}  # fmt: skip


def compile_one(job: tuple[str, str, str]) -> None:
    """Run one variant once, in a process of its own, so that Triton's cache holds its kernels."""
    name, size, variant = job
    part = PARTS[name]()
    with contextlib.redirect_stdout(None):
        sets, _ = part.make(part.sizes[size])
        part.run(part.variants[variant], sets[0])
    torch.cuda.synchronize()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, separated by commas")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workers", type=int, default=12, help="processes that compile; 0 for none")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("a CUDA device is needed: these kernels run on nothing else")
        return 1
    names = args.only.split(",")
    parts = {name: PARTS[name]() for name in names}
    if args.workers:
        jobs = []
        for name, part in parts.items():
            sizes = [size for at, size in enumerate(part.sizes) if at in part.kinds]
            jobs += [(name, size, variant) for variant in part.variants for size in sizes]
        with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
            for job, future in [(job, pool.submit(compile_one, job)) for job in jobs]:
                if future.exception() is not None:
                    print(job, repr(future.exception())[:200])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds")
    with torch.cuda.stream(torch.cuda.Stream()):
        for name, part in parts.items():
            for size in part.sizes:
                print(f"{name}: {size}")
                show(part, size, args.rounds)
    return 0


def show(part: Part, size: str, rounds: int) -> None:
    """Print one line for each variant at a size, the fastest marked."""
    sets, right = part.make(part.sizes[size])
    lines: list[tuple[float, str]] = []
    for name, variant in part.variants.items():
        try:
            found = [t.detach().clone() for t in part.run(variant, sets[0])]
            again = part.run(variant, sets[0])
            same = all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
            if right is None and variant is not None:
                right = found
            if right is not None and right[0].numel() == 1:  # a sum of sums
                found = [t.double().sum()[None] for t in found]
            far = "" if right is None or variant is None else f"{distance(found, right):.1e}"
            time = microseconds([lambda data=data, v=variant: part.run(v, data) for data in sets], rounds)
            said = "" if variant is None else "same" if same else "NOT the same"
            lines.append((time, f"    {name:<18} {time:8.2f}  {far:>8}  {said}"))
        except Exception as error:  # a variant may need more than the device has
            lines.append((float("inf"), f"    {name:<18} {type(error).__name__}: {str(error)[:90]}"))
    best = min(time for time, _ in lines)
    for time, line in lines:
        print(line + ("  <--" if time == best else ""), flush=True)


if __name__ == "__main__":
    sys.exit(main())
