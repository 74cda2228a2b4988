"""The checks of a cell, one small function each.

Bitwise equality is tested first and reported; a number is the largest difference in full precision.
Bounds are one for each dtype for the whole project and are never widened for a cell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from flodl_hf.models.encoder_model import EncoderModel
from flodl_hf.nn.joined_tensors import as_whole
from flodl_hf.nn.layout import Packed
from flodl_hf.parity.adapters import adapters
from flodl_hf.parity.cell import REORDERED, Bench, Evidence, Status, gap, verdict

HALF = {torch.bfloat16: 0.15, torch.float16: 0.03}
STEPS = 10


def config_triage(bench: Bench) -> Evidence:
    """Every key that transformers writes is used, ignored, or refused with its name; none is refused here."""
    from flodl_hf.checkpoints.config.model_config import read_config_file

    config = read_config_file(bench.folder)
    return Evidence("config triage", "pass", f"{len(config.source)} keys understood")


def key_map(bench: Bench) -> Evidence:
    """The names cover transformers' own at this size, one to one, without any memory."""
    from flodl_hf.models.building import build_graph
    from flodl_hf.parity.reference import parameter_names

    config = bench.ours.config
    theirs = parameter_names(bench.cell.architecture, bench.folder)
    pooler = any("pooler" in name for name in theirs)
    with torch.device("meta"):
        graph = build_graph(config, bench.cell.head, pooler=pooler)
    names = bench.cell.record.key_map(config.encoder, bench.cell.head)
    ours = names.names(name for name, _ in graph.named_parameters(remove_duplicate=False))
    if bench.cell.head == "base":
        prefix = bench.cell.record.base_prefix + "."
        theirs = {prefix + name for name in theirs}
    spec = None if bench.cell.head == "base" else bench.cell.record.heads[bench.cell.head]
    repeated = {alias for alias, _ in spec.aliases} if spec else set()
    # A name that only repeats a tied tensor need not exist on the other side.
    tied = {names.theirs(tie.also) for tie in spec.ties} if spec else set()
    covered: dict[str, set[str]] = {}
    for name, stored in ours.items():
        # The other side may use other names in memory than in its files.
        options = [stored, *names.also(name)]
        found = next((as_whole(o) for o in options if as_whole(o) in theirs), as_whole(stored))
        covered.setdefault(found, set()).add(stored)
    kept = {entry.name for entry in bench.cell.record.kept_by(bench.cell.head)}
    lost, extra = theirs - set(covered) - repeated - kept, set(covered) - theirs - tied
    faults = [f"{len(n)} {what}: {sorted(n)[:3]}" for what, n in (("not covered", lost), ("not theirs", extra)) if n]
    back = [name for name, stored in ours.items() if names.ours(stored) != name]
    if back:
        faults.append(f"{len(back)} do not read back: {back[:3]}")
    return Evidence("key map", "fail" if faults else "pass", "; ".join(faults) or f"{len(ours)} names, one to one")


def strict_load(bench: Bench) -> Evidence:
    """Every tensor of the model is filled from the file."""
    report = bench.ours.load_report
    assert report is not None
    status: Status = "pass" if report.trained else "fail"
    return Evidence(
        "strict load", status, f"{len(report.matched)} tensors, {len(report.tied)} tied, {len(report.new)} new"
    )


def forward(bench: Bench) -> Evidence:
    """Outputs on the awkward batches, each attention implementation against its counterpart."""
    gaps: dict[str, float] = {}
    for attention in ("sdpa", "eager"):
        ours = bench.ours.set_attention(attention)
        theirs = bench.theirs if attention == "sdpa" else bench.load_theirs("eager")
        gaps |= {f"{attention}, {name}": value for name, value in _gaps(bench, ours, theirs).items()}
    bench.ours.set_attention("sdpa")
    return verdict("forward", gaps, "outputs")


def _gaps(bench: Bench, ours: Any, theirs: Any) -> dict[str, float]:
    """Return the difference of each output on each awkward batch."""
    gaps: dict[str, float] = {}
    for batch in bench.batches():
        expected = theirs(batch.inputs)
        with torch.no_grad():
            found = ours(**batch.inputs)
        gaps |= {f"{batch.name}, {name}": gap(found[name], value) for name, value in expected.items()}
    return gaps


def layouts(bench: Bench) -> Evidence:
    """A row in a filled batch, alone, and packed among others."""
    model = bench.ours
    batch = next(b for b in bench.batches() if b.name == "mixed lengths").inputs
    batch = {key: value.flatten(0, -2) for key, value in batch.items()}  # a choice is a row
    lengths = batch["attention_mask"].sum(1).tolist()
    rows = [batch["input_ids"][i, :n] for i, n in enumerate(lengths)]
    layout = Packed.of(lengths)
    gaps: dict[str, float] = {}
    with torch.no_grad():
        together = _scores(model(**batch))
        found = model.graph(torch.cat(rows), layout=layout)
        parts = found.unbind(0) if model._per_text else layout.unpack(found)
        for i, row in enumerate(rows):
            expected = together[i] if model._per_text else together[i, : len(row)]
            size = max(1.0, float(expected.abs().max()))
            gaps[f"row {i} alone"] = gap(_scores(model(input_ids=row[None]))[0], expected) / size
            gaps[f"row {i} packed"] = gap(parts[i], expected) / size
    return verdict("padded = alone = packed", gaps, "rows", REORDERED)


def _scores(output: Any) -> Tensor:
    if "start_logits" in output:
        return torch.stack([output["start_logits"], output["end_logits"]], -1)
    return next(output[name] for name in ("logits", "prediction_logits", "last_hidden_state") if name in output)


def train_mode(bench: Bench) -> Evidence:
    """With dropout on and one seed the losses are equal, and every tensor gets a gradient."""
    ours, theirs = bench.load(), bench.load_theirs().model
    batch = next(b for b in bench.batches() if b.name == "mixed lengths").inputs
    labels = bench.labels(batch)
    ours.train()
    theirs.train()
    torch.manual_seed(7)
    expected = bench.loss(theirs(**batch, **labels), labels)
    torch.manual_seed(7)
    found = bench.loss(ours(**batch, **labels), labels)
    found.backward()
    # The bias of spans, or of choices, moves all scores that are compared alike: its true gradient is zero.
    alike = {"question_answering": "head.spans.bias", "multiple_choice": "head.classifier.bias"}.get(bench.cell.head)
    without = [
        name for name, p in ours.graph.named_parameters()
        if p.grad is None or not (bool(p.grad.any()) or name == alike)
    ]  # fmt: skip
    if without:
        return Evidence("train mode", "fail", f"{len(without)} tensors get no gradient", None, without[0])
    return verdict("train mode", {"loss under dropout": gap(found.detach(), expected.detach())}, "loss with dropout")


def gradients(bench: Bench) -> Evidence:
    """Loss and every gradient with dropout off."""
    ours, theirs = bench.load(), bench.load_theirs().model
    batch = next(b for b in bench.batches() if b.name == "mixed lengths").inputs
    labels = bench.labels(batch)
    ours.eval()
    expected, found = theirs(**batch, **labels), ours(**batch, **labels)
    mine, other = bench.loss(found, labels), bench.loss(expected, labels)
    mine.backward()
    other.backward()
    gaps = {"loss": gap(mine.detach(), other.detach())}
    for name, a, b in bench.pairs(ours, theirs, lambda p: p.grad):
        gaps[name] = gap(a, b) if a is not None and b is not None else 0.0 if a is b else float("nan")
    return verdict("loss and gradients", gaps, "tensors")


def training_steps(bench: Bench) -> Evidence:
    """Ten steps of AdamW with clipping, dropout off, by one loop on both sides."""
    sides: list[Any] = [bench.load(), bench.load_theirs().model]
    optimizers = [torch.optim.AdamW(side.parameters(), lr=1e-3, weight_decay=0.01, foreach=False) for side in sides]
    batches = [b.inputs for b in bench.batches()]
    for step in range(STEPS):
        batch = batches[step % len(batches)]
        labels = bench.labels(batch, step)
        for side, optimizer in zip(sides, optimizers, strict=True):
            side.eval()
            optimizer.zero_grad()
            bench.loss(side(**batch, **labels), labels).backward()
            # The norm adds the tensors in one order on both sides: a sum of norms depends on its order.
            pairs = bench.pairs(sides[0], sides[1], lambda p: p.grad)
            grads = [pair[1] if side is sides[0] else pair[2] for pair in pairs]
            norm = torch.nn.utils.get_total_norm([grad for grad in grads if grad is not None], foreach=False)
            torch.nn.utils.clip_grads_with_norm_(side.parameters(), 1.0, norm, foreach=False)
            optimizer.step()
    gaps = {name: gap(a, b) for name, a, b in bench.pairs(sides[0], sides[1])}
    return verdict(f"{STEPS} training steps", gaps, "tensors")


def export_bytes(bench: Bench) -> Evidence:
    """An untouched model is written back as the files it was read from."""
    out = bench.load().save_pretrained(bench.room / "export", overwrite=True)
    names = sorted(p.name for p in bench.folder.iterdir() if p.is_file() and p.name != "verification.json")
    lost = [n for n in names if not (out / n).is_file()]
    other = [n for n in names if n not in lost and (out / n).read_bytes() != (bench.folder / n).read_bytes()]
    faults = [f"{what}: {', '.join(n)}" for what, n in (("lost", lost), ("differing", other)) if n]
    return Evidence("export", "fail" if faults else "pass", "; ".join(faults) or f"{len(names)} files, byte for byte")


def reload(bench: Bench) -> Evidence:
    """Transformers loads our export of a changed model without a missing or surplus key, to the same outputs."""
    model = bench.load()
    with torch.no_grad():
        # A changed model is saved with current names, as fine-tuning does.
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert model.source is not None
    model.source.same_head = False
    out = model.save_pretrained(bench.room / "changed", overwrite=True)
    theirs = bench.load_theirs(folder=out)
    if theirs.missing or theirs.unexpected:
        return Evidence("reload", "fail", f"missing {theirs.missing[:3]}, unexpected {theirs.unexpected[:3]}")
    return verdict("reload", _gaps(bench, model, theirs), "outputs after 0 missing, 0 unexpected keys")


TEXTS = (
    "The soup was delicious.",
    "Our guide was rude and very late, but the hotel was clean.",
    "x",
    "What a day! " * 20,
)


_PAIRS = [("Who was late?", text) for text in TEXTS]
_ITEMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "token_classification": (TEXTS, {"aggregation": "simple", "ignore_labels": ()}),
    "multiple_choice": ([(text, ["Who was late?", *TEXTS[:2]]) for text in TEXTS], {}),
    "next_sentence": (_PAIRS, {}),
    "replaced_tokens": (TEXTS, {"replaced_only": False}),
}
"""Items and options of ``predict``, where they are not the texts alone."""
_FIELDS = ("label", "start", "end", "index", "token_ids")
"""The fields that identify a result."""


def predictions(bench: Bench) -> Evidence:
    """Decoded answers from raw text, ours by the runtime and theirs row by row through transformers' model."""
    ours, theirs = bench.ours, bench.theirs.model
    expected = _decode(ours, bench.cell.head, lambda rows: [_row_scores(theirs, ours, row) for row in rows])
    found = _decode(ours, bench.cell.head, None)
    gaps: dict[str, float] = {}
    for i, (mine, other) in enumerate(zip(found, expected, strict=True)):
        if not _same_answers(mine, other):
            return Evidence("predictions", "fail", f"text {i}: {mine[0]} and {other[0]}", None, f"text {i}")
        gaps[f"text {i}"] = max((abs(a - b) for a, b in zip(mine[1], other[1], strict=True)), default=0.0)
    return verdict("predictions", gaps, "texts with equal answers; scores", REORDERED)


def _same_answers(mine: tuple[Any, list[float]], other: tuple[Any, list[float]]) -> bool:
    """Return whether the answers are equal and in the same order, except for ties in score.

    If two scores differ less than by summation order, the order of their answers is arbitrary.
    """
    if mine[0] == other[0]:
        return True
    if sorted(mine[0]) != sorted(other[0]):
        return False
    score_of = dict(zip(other[0], other[1], strict=True))
    pairs = zip(mine[0], other[1], strict=True)
    return all(abs(score_of[answer] - score) <= REORDERED * max(score, 1e-3) for answer, score in pairs)


def _row_scores(theirs: Any, ours: Any, row: Any) -> Tensor:
    inputs = {
        "input_ids": torch.tensor([list(row.ids)]),
        "attention_mask": torch.ones(1, len(row.ids), dtype=torch.long),
    }
    if ours.config.uses_token_types and ours.tokenizer.settings.type_ids:
        inputs["token_type_ids"] = torch.tensor([list(row.type_ids)])
    if ours.head == "multiple_choice":
        inputs = {key: value[None] for key, value in inputs.items()}
    with torch.no_grad():
        return _scores(dict(theirs(**inputs).items()))[0]


def _decode(model: Any, head: str, scores: Callable[[list[Any]], list[Tensor]] | None) -> list[tuple[Any, list[float]]]:
    """Return (answer, scores) for each text, with the scores of the forward pass replaced if given."""
    from flodl_hf.inference import batch as passes

    def replaced(graph: Any, ids: Tensor, types: Tensor | None, layout: Any, **options: Any) -> Tensor:
        """Return a batch's scores as another implementation gives them, row by row."""
        kinds = torch.zeros_like(ids) if types is None else types
        pairs = zip(layout.unpack(ids), layout.unpack(kinds), strict=True)
        rows = [SimpleNamespace(ids=own.tolist(), type_ids=kind.tolist()) for own, kind in pairs]
        return (torch.stack if model._per_text else torch.cat)(scores(rows))  # type: ignore[misc]

    saved = passes.scored, passes.all_states, passes.headed
    if scores is not None:
        passes.scored = replaced
        passes.all_states = lambda graph, ids, types, layout: (replaced(graph, ids, types, layout), layout)
        passes.headed = lambda graph, picked, layout: picked
    try:
        if head == "base":
            return [((), vector.tolist()) for vector in model.embed(TEXTS, windows=True)]
        if head in ("masked_lm", "pretraining"):
            masked = [f"[MASK] {text} [MASK]" for text in TEXTS]
            found = [[fill for mask in row for fill in mask] for row in model.fill_mask(masked, top_k=3)]
        elif head == "question_answering":
            found = model.answer_batch(_PAIRS, top_k=2)
        else:
            items, options = _ITEMS.get(head, (TEXTS, {}))
            found = model.predict(items, **options)
        return [
            (
                [tuple(getattr(one, name) for name in _FIELDS if hasattr(one, name)) for one in row],
                [one.score for one in row],
            )
            for row in found
        ]
    finally:
        passes.scored, passes.all_states, passes.headed = saved


def half_precision(bench: Bench) -> Evidence:
    """Outputs in fp16 and bf16 are finite and near those in fp32, relative to the largest of them."""
    batch = next(b for b in bench.batches() if b.name == "mixed lengths").inputs
    keep = batch["attention_mask"].bool()
    gaps: dict[str, float] = {}
    bounds: dict[str, float] = {}
    for dtype, bound in HALF.items():
        model = bench.load(dtype=dtype)
        with torch.no_grad():
            exact, half = _scores(bench.ours(**batch)), _scores(model(**batch)).float()
        exact, half = (exact, half) if model._per_text else (exact[keep], half[keep])
        name = str(dtype).removeprefix("torch.")
        near = float((half - exact).abs().max() / exact.abs().max().clamp(min=1e-3))
        gaps[name], bounds[name] = near if bool(half.isfinite().all()) else float("nan"), bound
    good = all(gaps[name] <= bounds[name] for name in gaps)
    detail = ", ".join(f"{name} {gap:.2g}" for name, gap in gaps.items())
    return Evidence(
        "half precision", "pass" if good else "fail", f"relative distance from fp32: {detail}", max(gaps.values())
    )


def first_parting(ours: EncoderModel, theirs: nn.Module, inputs: dict[str, Tensor]) -> tuple[str, str] | None:
    """Return the first of our modules, in graph order, whose outputs differ, with a description; None if none does.

    Args:
        ours: our model.
        theirs: transformers' model of the same checkpoint.
        inputs: one batch.
    """
    family = ours.config.family
    our_modules, their_modules = dict(ours.graph.named_modules()), dict(theirs.named_modules())
    prefix = family.base_prefix + "."
    names: dict[str, str] = {}
    for mine, other in family.key_map(ours.config.encoder, ours.head).pairs.items():
        name = next((n for n in (other, other.removeprefix(prefix)) if n in their_modules), None)
        if mine in our_modules and name is not None:
            names[mine] = name
    left = _record({mine: our_modules[mine] for mine in names}, lambda: ours(**inputs))
    right = _record({other: their_modules[other] for other in names.values()}, lambda: theirs(**inputs))
    # Dictionaries keep the order in which our side called its modules, which is the graph's.
    for (mine, call), (given, made) in left.items():
        other = names[mine]
        their_given, their_made = right.get((other, call), (torch.zeros(0), torch.zeros(0)))
        if not torch.equal(made, their_made):
            by = f"{gap(made, their_made):.3g}" if made.shape == their_made.shape else "its shape"
            cause = "its own arithmetic or weights" if torch.equal(given, their_given) else "its inputs"
            return mine, f"{mine} ({other}), call {call}: differs by {by}, because of {cause}"
    return None


def _record(modules: dict[str, nn.Module], run: Callable[[], Any]) -> dict[tuple[str, int], tuple[Tensor, Tensor]]:
    """Return first input and output of each call, by module and index of the call: shared layers run repeatedly."""
    calls: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
    counts: Counter[str] = Counter()

    def note(name: str, _: nn.Module, inputs: tuple[Any, ...], made: Any) -> None:
        value = made[0] if isinstance(made, tuple) else made
        entry = inputs[0] if inputs and isinstance(inputs[0], Tensor) else torch.zeros(0)
        calls[name, counts[name]] = entry.detach().clone(), value.detach().clone()
        counts[name] += 1

    hooks = [module.register_forward_hook(partial(note, name)) for name, module in modules.items()]
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


CHECKS: tuple[Callable[[Bench], Evidence], ...] = (
    config_triage,
    key_map,
    strict_load,
    forward,
    layouts,
    train_mode,
    gradients,
    training_steps,
    export_bytes,
    reload,
    predictions,
    half_precision,
    adapters,
)
