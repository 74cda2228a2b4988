"""``flodl-hf demo``: the whole way on this machine alone, from sentences to a verified folder."""

from __future__ import annotations

from pathlib import Path

import typer

from flodl_hf.cli.command import command_line
from flodl_hf.cli.options import JSON, option, with_parameters
from flodl_hf.cli.shared import emit_json, progress, reporting, say, tell
from flodl_hf.cli.verify_export import MARKS
from flodl_hf.errors import ExportError


@reporting
@with_parameters((
    option("out", Path, "Where to write the model.", "--out", "-o", default=Path("demo-model")),
    option("steps", int, "Training steps.", default=200, min=1),
    option("seed", int, "Seed of weights, order and dropout.", default=0),
    option("overwrite", bool, "Replace a folder that the demo did not write.", default=False), JSON,
))  # fmt: skip
def command(out: Path, steps: int, seed: int, overwrite: bool, json_output: bool) -> None:
    """Train a small sentiment model, predict with it, export it and verify the export. No network.

    The sentences come with the package; the result is an ordinary Hugging Face folder.
    """
    from flodl_hf.export.verify import verify_export
    from flodl_hf.training import demo

    if not overwrite and out.is_dir() and not (demo.is_demo(out) or next(out.iterdir(), None) is None):
        raise ExportError(
            f"{out}: contains files of other origin; expected a new folder, an empty one, or a demo's to replace. "
            "Give another, or allow it: overwrite=True"
        )
    data = demo.sentences()
    say(f"1. learning a vocabulary from {len(data)} sentences")
    tokenizer = demo.learn_vocabulary()
    model = demo.demo_model(tokenizer, seed)
    size = sum(p.numel() for p in model.parameters())
    say(f"   {tokenizer.vocab_size} word pieces; a BERT of {size:,} weights")
    say(f"2. training it to distinguish {' from '.join(demo.LABELS)}, {steps} steps")
    with progress() as bar:
        task = bar.add_task("   training", total=steps, note="")
        loss = demo.train(
            model, steps, seed, lambda step, value: bar.update(task, completed=step + 1, note=f"loss {value:.3f}")
        )
    say(f"   loss {loss:.3f}")

    say("3. predicting sentences that it has not seen")
    texts = [text for text, _ in demo.UNSEEN]
    answers = [found[0] for found in model.predict(texts)]
    right = sum(a.label == label for a, (_, label) in zip(answers, demo.UNSEEN, strict=True))
    if not json_output:
        for text, found in zip(texts, answers, strict=True):
            tell(f"   {found.label:<10}{found.score:.3f}  {text}")
    say(f"   {right} of {len(texts)} correct")

    say(f"4. exporting to {out}")
    folder = model.save_pretrained(out, overwrite=True)
    say("5. verifying: reopened, and compared with transformers if it is installed")
    result = verify_export(folder, model=model, command="flodl-hf demo")
    if json_output:
        emit_json({"folder": str(folder), "loss": loss, "right": right, "of": len(texts), "verify": result.to_dict()})
    else:
        for check in result.checks:
            tell(f"   {MARKS[check.status]}  {check.name}: {check.detail}")
        tell(NEXT.format(out=command_line(out)))
    if right < len(texts):
        say(f"failed: {len(texts) - right} of {len(texts)} answers are wrong; train longer: --steps 200 or more")
    raise typer.Exit(0 if result.passed and right == len(texts) else 1)


NEXT = """
Try next:
  flodl-hf predict {out} "The film was wonderful."
  flodl-hf inspect {out}
  flodl-hf predict distilbert/distilbert-base-uncased-finetuned-sst-2-english "I love this."
  flodl-hf predict dslim/bert-base-NER "Ada Lovelace lives in London."
  flodl-hf export dslim/bert-base-NER --out ner && flodl-hf verify-export ner --source dslim/bert-base-NER"""
