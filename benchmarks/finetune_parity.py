"""The same recipe twice, here and in a plain transformers + PyTorch loop: are the two equal to the bit?

Both start from the same weights, see the same batches in the same order, and use no dropout. Compared are the loss
of every step and, at the end, every weight. Run on a CPU; on a GPU, kernels may differ and the distance is printed.

    python benchmarks/finetune_parity.py                                  # the demo model on its sentences
    python benchmarks/finetune_parity.py --model DIR --train train.tsv --steps 50
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flodl.data import DataLoader
from flodl_hf.models.saving import stored_tensors
from flodl_hf.training.job import Job, plan_job
from flodl_hf.training.options import make_options
from flodl_hf.training.run import train_job


@dataclass
class Parity:
    """Both loss curves, and how far apart losses and weights are; 0.0 means equal to the bit."""

    ours: list[float]
    theirs: list[float]
    losses_apart: float
    weights_apart: float
    different_weights: list[str] = field(default_factory=list)
    seconds: tuple[float, float] = (0.0, 0.0)

    @property
    def equal(self) -> bool:
        return self.ours == self.theirs and not self.different_weights


class Recorder:
    """The objective, with the mean loss of every batch noted as the backward pass gets it."""

    def __init__(self, objective: Any) -> None:
        self.objective = objective
        self.losses: list[float] = []

    def __call__(self, model: Any, batch: Any) -> Any:
        loss = self.objective(model, batch)
        self.losses.append(float(loss.as_mean().detach()))
        return loss


def compare(model: str | Path, train: Any, steps: int, options: Mapping[str, Any] | None = None) -> Parity:
    """Return what ``steps`` steps of one recipe give on both sides.

    Args:
        model: a folder or Hub name.
        train: training data.
        steps: optimiser steps.
        options: of `flodl_hf.training.finetune`; one micro-batch a step, and no dropout, are set here.
    """
    chosen = make_options({**(options or {}), "max_steps": steps, "dropout": 0.0, "devices": "cpu"})
    job = plan_job(model, train, None, chosen)
    recorder = Recorder(job.objective)
    job.objective = recorder  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start"
        job.model.save_pretrained(start)
        reference = load_reference(start, job)
    began = time.perf_counter()
    theirs = plain_loop(reference, job)
    between = time.perf_counter()
    with ExitStack() as stack:
        trained = train_job(job, lambda event: None, stack)
    assert trained is not None  # of another rank alone
    seconds = (time.perf_counter() - between, between - began)
    mine = {name: tensor.cpu() for name, tensor in stored_tensors(trained).items()}
    other = {name: tensor.detach().cpu() for name, tensor in reference.state_dict().items() if name in mine}
    lost = sorted(mine.keys() - other.keys())
    if lost:
        raise SystemExit(f"the reference has no {', '.join(lost)}")
    different = [name for name in mine if not torch.equal(mine[name], other[name])]
    apart = max(((mine[n].double() - other[n].double()).abs().max().item() for n in different), default=0.0)
    losses = max((abs(a - b) for a, b in zip(recorder.losses, theirs, strict=True)), default=0.0)
    return Parity(recorder.losses, theirs, losses, apart, different, seconds)


def load_reference(folder: Path, job: Job, *, dropout: bool = False) -> Any:
    """Return transformers' model of the folder, with its dropout or without."""
    import transformers

    classes = {
        "sequence_classification": transformers.AutoModelForSequenceClassification,
        "token_classification": transformers.AutoModelForTokenClassification,
        "question_answering": transformers.AutoModelForQuestionAnswering,
        "masked_lm": transformers.AutoModelForMaskedLM,
        "multiple_choice": transformers.AutoModelForMultipleChoice,
        "next_sentence": transformers.AutoModelForNextSentencePrediction,
        "pretraining": transformers.AutoModelForPreTraining,
        "replaced_tokens": transformers.AutoModelForPreTraining,
    }
    model = classes[job.task.head].from_pretrained(folder, attn_implementation=job.options.attention)
    for module in () if dropout else model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout_prob", None), float):
            module.dropout_prob = 0.0  # type: ignore[assignment]
    return model


def plain_loop(model: Any, job: Job) -> list[float]:
    """Return the losses of a loop as anybody would write it; ``model`` is trained in place."""
    from transformers import get_scheduler

    options = job.options
    decayed, rest = [], []
    for name, parameter in model.named_parameters():
        (rest if name.endswith("bias") or "norm" in name.lower() else decayed).append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": options.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
    )
    warmup = job.schedule.warmup
    scheduler = get_scheduler(options.schedule, optimizer, num_warmup_steps=warmup, num_training_steps=job.steps)
    loader = DataLoader(job.rows, batches=job.batches, collate=job.collate, seed=options.seed)
    # The norm of the gradient is a sum over parameters, and the two libraries list a masked-word head in another
    # order; in one order the sums are equal.
    named = dict(model.named_parameters())
    clipped = list(dict.fromkeys(named[name] for name in stored_tensors(job.model) if name in named))
    assert len(clipped) == len(list(model.parameters()))
    losses: list[Any] = []
    device = next(model.parameters()).device
    model.train()
    epoch = 0
    while len(losses) < job.steps:
        for batch in loader.epoch(epoch):
            inputs = their_inputs(job, {name: batch[name] for name in batch.names})
            inputs = {name: part.to(device) for name, part in inputs.items()}
            loss = model(**inputs).loss
            loss.backward()
            if options.max_grad_norm:
                torch.nn.utils.clip_grad_norm_(clipped, options.max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if len(losses) == job.steps:
                break
        epoch += 1
    return [float(loss) for loss in losses]


def their_inputs(job: Job, batch: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a batch as transformers' classes name and shape them."""
    inputs = {name: part for name, part in batch.items() if isinstance(part, torch.Tensor) and name != "slots"}
    if job.task.head == "multiple_choice":
        shape = batch["slots"].shape
        return {name: part if name == "labels" else part.view(*shape, -1) for name, part in inputs.items()}
    if "related" in inputs:
        ordered = job.model.config.family.heads["pretraining"].relation_output == "sop_logits"
        inputs["sentence_order_label" if ordered else "next_sentence_label"] = inputs.pop("related")
    return inputs


def write_demo(folder: Path) -> tuple[Path, list[dict[str, str]]]:
    """Return the untrained demo model's folder, and the sentences it comes with."""
    from flodl_hf.training import demo

    rows = [{"text": text, "label": demo.LABELS[label]} for text, label in demo.sentences()]
    return demo.demo_model(demo.learn_vocabulary()).save_pretrained(folder / "demo"), rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hub name; by default the demo model")
    parser.add_argument("--train", help="training data")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an option, as YAML")
    parser.add_argument("--json", type=Path, help="write both curves to this file")
    said = parser.parse_args()
    import yaml

    options = {name: yaml.safe_load(value) for name, _, value in (item.partition("=") for item in said.set)}
    with tempfile.TemporaryDirectory() as folder:
        model, train = (said.model, said.train) if said.model else write_demo(Path(folder))
        found = compare(model, train, said.steps, options)
    for step, (a, b) in enumerate(zip(found.ours, found.theirs, strict=True)):
        if step < 5 or step == said.steps - 1 or a != b:
            print(f"step {step:>4}  ours {a!r:<22} theirs {b!r:<22} {'equal' if a == b else 'APART'}")
    print(f"losses apart {found.losses_apart:g}, weights apart {found.weights_apart:g}")
    print(f"seconds: ours {found.seconds[0]:.1f}, plain loop {found.seconds[1]:.1f}")
    if said.json:
        said.json.write_text(json.dumps({"ours": found.ours, "theirs": found.theirs}))
    print("equal to the bit" if found.equal else f"NOT EQUAL: {len(found.different_weights)} weights differ")
    raise SystemExit(0 if found.equal else 1)


if __name__ == "__main__":
    main()
