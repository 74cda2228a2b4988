"""Export a model for another engine: ONNX or torch.export, compared with our outputs before it is published.

Decides the folder: the file, configuration, tokenizer, small files of sentence-transformers, ``checksums.json``, and
``verification.json`` with the compared batches and the largest difference. It is written next to its
target, read again as its users read it, compared, and renamed: a file with different numbers is never
published.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flodl_hf.checkpoints.folders import WEIGHT_FILES, refused
from flodl_hf.checkpoints.saving.publish import is_model_file, publish_folder
from flodl_hf.checkpoints.saving.state import write_bytes
from flodl_hf.checkpoints.weights.checksums import CHECKSUMS, compare_folder, write_checksums
from flodl_hf.errors import ExportError, PredictError
from flodl_hf.export.traced import Traced, with_torch_defaults
from flodl_hf.export.verify import ENGINE_FILES, RECEIPT, Check, Verification, versions
from flodl_hf.parity.onnx_session import OnnxModel, require

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from flodl_hf.models.encoder_model import EncoderModel
    from flodl_hf.parity.cell import AwkwardBatch

__all__ = ["EngineFile", "export_onnx", "export_program"]

OPSET = 18
"""Version of ONNX's operators: December 2022, which every ONNX Runtime from 1.14 supports."""
BOUND = 1e-4
"""The largest difference from our outputs, of values up to 1; of larger ones as a part of the largest."""
ONNX, PROGRAM = ENGINE_FILES
DATA = "model.onnx_data"
_OURS = (ONNX, f"onnx/{DATA}", PROGRAM)
_EXTERNAL_FROM = 1 << 30
"""Weights above this many bytes are stored in an external file; an ONNX file cannot have 2 GiB."""
_MOST_TOKENS = 1024
"""Tokens of the longest rows compared: attention of eight times as many takes gigabytes."""

Answer = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True)
class EngineFile:
    """An exported engine file.

    Attributes:
        folder: the written folder.
        file: the engine's file in it.
        inputs: names of inputs with the names of their axes.
        outputs: names of outputs with the names of their first axes.
        largest_difference: from our outputs, over all compared batches.
        receipt: the comparison, as in ``verification.json``.
    """

    folder: Path
    file: str
    inputs: Mapping[str, tuple[str, ...]]
    outputs: Mapping[str, tuple[str, ...]]
    largest_difference: float
    receipt: Verification


def export_onnx(
    model: EncoderModel,
    folder: str | Path,
    *,
    opset: int = OPSET,
    external_data: bool | None = None,
    overwrite: bool = False,
    command: str | None = None,
) -> EngineFile:
    """Write ``model`` as ONNX for any number and length of rows, compare it in ONNX Runtime, return the result.

    The folder layout is the Hub's: ``onnx/model.onnx``, with configuration and tokenizer.

    Args:
        model: any model of this package, in float32.
        folder: the target; parents are created.
        opset: the version of ONNX's operators.
        external_data: store weights in an external file; None does so above a gigabyte.
        overwrite: replace a folder that was exported for an engine.
        command: the calling command, for the receipt.

    Raises:
        ExportError: packages are missing, the opset is none or one that torch or ONNX Runtime cannot do, the model
            cannot be traced for all shapes, its outputs in ONNX Runtime are further than `BOUND` from ours, or the
            folder is in use. An older folder is then as it was.
    """
    require("onnx", "onnxscript", "onnxruntime")
    import onnx  # pyright: ignore[reportMissingImports]

    latest = onnx.defs.onnx_opset_version()
    if not 1 <= opset <= latest:
        expected = f"1 to {latest}, as in onnx {onnx.__version__}, such as {OPSET}"
        raise refused("export", f"opset {opset}", expected, kind=ExportError)
    traced = Traced(model)
    size = sum(p.nbytes for p in {id(p): p for p in traced.parameters()}.values())
    beside = size > _EXTERNAL_FROM if external_data is None else external_data

    def write(stage: Path, program: ExportedProgram) -> None:
        _write_onnx(traced, program, stage / ONNX, opset, beside)

    def opened(stage: Path) -> Answer:
        session = OnnxModel(stage / ONNX)
        return lambda inputs: {name: torch.from_numpy(value) for name, value in session.run(**inputs).items()}

    facts = {"opset": opset, "external_data": beside}
    return _Export(traced, ONNX, "ONNX Runtime", facts, BOUND).publish(
        folder, write, opened, 2 * size, overwrite, command
    )


def export_program(
    model: EncoderModel, folder: str | Path, *, overwrite: bool = False, command: str | None = None
) -> EngineFile:
    """Write ``model`` as ``model.pt2``, a program of torch.export for any number and length of rows.

    ``torch.export.load(folder / "model.pt2").module()`` runs without this package. Its outputs are
    compared with ours, and equal to the bit.

    Args:
        model: any model of this package, in float32.
        folder: the target; parents are created.
        overwrite: replace a folder that was exported for an engine.
        command: the calling command, for the receipt.

    Raises:
        ExportError: the model cannot be traced for all shapes, the written file gives other outputs, or the folder
            is in use. An older folder is then unchanged.
    """
    traced = Traced(model)
    size = sum(p.nbytes for p in {id(p): p for p in traced.parameters()}.values())

    def write(stage: Path, program: ExportedProgram) -> None:
        with with_torch_defaults():
            torch.export.save(program, stage / PROGRAM)

    def opened(stage: Path) -> Answer:
        with with_torch_defaults():
            module = torch.export.load(stage / PROGRAM).module()
        return lambda inputs: module(**inputs)

    return _Export(traced, PROGRAM, "torch.export", {}, 0.0).publish(folder, write, opened, size, overwrite, command)


def _write_onnx(traced: Traced, program: ExportedProgram, path: Path, opset: int, beside: bool) -> None:
    import onnx  # pyright: ignore[reportMissingImports]
    import onnx_ir  # pyright: ignore[reportMissingImports]

    named = {name: dict(enumerate(axes)) for name, axes in traced.inputs.items()}
    path.parent.mkdir()
    with with_torch_defaults():
        made = torch.onnx.export(
            program, (), kwargs=traced.example(), dynamo=True, opset_version=opset, input_names=list(traced.inputs),
            output_names=list(traced.outputs), dynamic_shapes=named, verbose=False,
        )  # fmt: skip
        assert made is not None
        values: list[Any] = [*made.model.graph.inputs, *made.model.graph.outputs]
        for value in values:
            # The first axes get their names in place of torch's.
            names = traced.inputs.get(value.name) or traced.outputs[value.name]
            value.shape = onnx_ir.Shape([*names, *list(value.shape)[len(names) :]])
        onnx_ir.save(made.model, path, external_data=DATA if beside else None)
        onnx.checker.check_model(str(path))
    stated = {entry.domain: entry.version for entry in onnx.load(path, load_external_data=False).opset_import}
    if (written := stated.get("")) != opset:
        found, expected = f"torch {torch.__version__} wrote ONNX of opset {written}", f"{opset}; give another: {OPSET}"
        raise refused("export", found, expected, kind=ExportError)


class _Export:
    """One file for one engine: written, read again, compared, described."""

    def __init__(self, traced: Traced, file: str, engine: str, facts: dict[str, Any], bound: float) -> None:
        self.traced, self.file, self.engine, self.facts, self.bound = traced, file, engine, facts, bound
        source = traced.model.source
        self.receipt = Verification("", None if source is None else source.name)
        self.largest = 0.0

    def publish(
        self, folder: str | Path, write: Callable[[Path, ExportedProgram], None], opened: Callable[[Path], Answer],
        needed: int, overwrite: bool, command: str | None,
    ) -> EngineFile:  # fmt: skip
        from flodl_hf.models.saving import surroundings

        for name in WEIGHT_FILES:
            if os.path.lexists(Path(folder) / name):
                found = f"found {name}: an export for {self.engine} replaces the folder, with a model's weights"
                raise refused(folder, found, "a new folder, or one written for an engine", kind=ExportError)
        self.receipt.folder = Path(folder).name

        def writer(stage: Path) -> None:
            write(stage, self.traced.program())
            # Next to the engine file: configuration, tokenizer, small files of sentence-transformers.
            for name, data in surroundings(self.traced.model).items():
                path = stage / name
                path.parent.mkdir(parents=True, exist_ok=True)
                write_bytes(path, data)
            self._compare(opened(stage))
            self._describe(stage, command)

        place = publish_folder(
            folder, writer, overwrite=overwrite, needed_bytes=needed,
            replaceable=lambda name: is_model_file(name) or name in _OURS,
        )  # fmt: skip
        if faults := compare_folder(place).faults:
            found = f"verification failed after writing: {'; '.join(map(str, faults))}"
            raise refused(place, found, "the same bytes; check the disk", kind=ExportError)
        return EngineFile(place, self.file, self.traced.inputs, self.traced.outputs, self.largest, self.receipt)

    def _compare(self, answer: Answer) -> None:
        """Run awkward batches through both sides.

        Raises:
            ExportError: they are too far apart.
        """
        bad = []
        for batch in _batches(self.traced):
            expected = self.traced(**batch.inputs)
            real = batch.inputs["attention_mask"].bool()
            for name, value in expected.items():
                if not torch.isfinite(value[real] if "tokens" in self.traced.outputs[name] else value).all():
                    found = f"the model's own {name} of {batch.name} has values that are not finite"
                    raise refused("export", found, "finite values. Look at its weights", kind=ExportError)
            try:
                answered = answer(batch.inputs)
            except PredictError as fault:
                found = f"{self.engine} cannot run the exported {type(self.traced.model).__name__} ({fault})"
                expected_answer = f"an answer for {batch.name}. Nothing was written; opset={OPSET} works everywhere"
                raise refused("export", found, expected_answer, kind=ExportError) from fault
            shape = " x ".join(str(n) for n in batch.inputs["input_ids"].shape)
            gaps = [self._gap(name, answered.get(name), value, real) for name, value in expected.items()]
            gap = max(gaps) if set(answered) == set(expected) else float("inf")
            self.largest = max(self.largest, gap)
            good = gap <= self.bound
            how = "equal to the bit" if gap == 0 else f"largest difference {gap:.3g}"
            detail = f"{shape} ids, {how}, bound {self.bound:g}"
            self.receipt.checks.append(Check(f"{self.engine}: {batch.name}", "pass" if good else "fail", detail, gap))
            if not good:
                bad.append(f"{batch.name} ({detail})")
        if bad:
            kind = f"{type(self.traced.model).__name__} of {self.traced.model.config.model_type}"
            found = f"{self.engine} does not compute what {kind} does: {'; '.join(bad)}. Nothing was written"
            expected = "equal outputs; please report this with the configuration"
            raise refused("export", found, expected, problems=bad, kind=ExportError, largest_difference=self.largest)

    def _gap(self, name: str, values: Tensor | None, expected: Tensor, real: Tensor) -> float:
        """Return the largest difference at real tokens; endless where something is no number.

        A filled place that sees no real token (attention has windows) has a state that no engine means anything by.
        """
        if values is None or values.shape != expected.shape or not bool(torch.isfinite(values).all()):
            return float("inf")
        if "tokens" in self.traced.outputs[name]:
            values, expected = values[real], expected[real]
        largest = max(1.0, float(expected.abs().max())) if self.bound else 1.0
        return float((values.double() - expected.double()).abs().max()) / largest

    def _describe(self, stage: Path, command: str | None) -> None:
        model, traced = self.traced.model, self.traced
        recipe = model.sentence_recipe
        # An engine file does not record that a folder excludes the tokens of prompts from vectors.
        if "sentence_embedding" in traced.outputs and recipe is not None and not recipe.include_prompt:
            detail = "sentence_embedding counts tokens of prompts: pool last_hidden_state without them instead"
            self.receipt.checks.append(Check(f"{self.engine}: prompts", "not run", detail))
        write_checksums(stage)
        listed = json.loads((stage / CHECKSUMS).read_text("utf-8"))["files"]
        packages = ("onnx", "onnxscript", "onnxruntime") if self.engine == "ONNX Runtime" else ()
        self.receipt.facts = {
            "file": self.file,
            "task": model.head,
            "model_type": model.config.model_type,
            "inputs": {name: list(axes) for name, axes in traced.inputs.items()},
            "outputs": {name: list(axes) for name, axes in traced.outputs.items()},
            "dtype": "float32",
            "largest_difference": self.largest,
            "bound": self.bound,
            **self.facts,
            "sha256": {name: file["sha256"] for name, file in listed.items()},
            "versions": versions() | {name: version(name) for name in packages},
            "command": command,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        write_bytes(stage / RECEIPT, (json.dumps(self.receipt.to_dict(), indent=2) + "\n").encode())


def _batches(traced: Traced) -> Iterator[AwkwardBatch]:
    """Yield the compared batches: single rows, padding on either side, one token, two texts, and the longest."""
    from flodl_hf.parity.cell import AwkwardBatch, as_choices, awkward_batches

    model = traced.model
    limit = model.max_tokens or _MOST_TOKENS
    batches = awkward_batches(model.config, longest=min(limit, _MOST_TOKENS))
    for batch in map(as_choices, batches) if model.head == "multiple_choice" else batches:
        given = {"token_type_ids": torch.zeros_like(batch.inputs["input_ids"]), **batch.inputs}
        given = {name: given[name] for name in traced.inputs}
        yield AwkwardBatch(batch.name, given)
        if batch.name == "mixed lengths":
            yield AwkwardBatch("filled on the left", {name: value.flip(-1) for name, value in given.items()})
