"""Reopen a written folder and compare it with its source, and both with transformers.

Each check is one small function and one line of the result; all of them together are a receipt that
can be stored next to the weights (``verification.json``).
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from flodl.errors import FlodlError
from flodl.files import write_atomically
from flodl_hf.checkpoints.config.model_config import read_config_file
from flodl_hf.checkpoints.folders import WEIGHT_FILES, refused
from flodl_hf.checkpoints.saving.state import same_bits
from flodl_hf.checkpoints.sentence.settings import transformer_folder, transformer_folders
from flodl_hf.checkpoints.system import own_version
from flodl_hf.checkpoints.weights.checkpoint import Checkpoint
from flodl_hf.checkpoints.weights.checksums import CHECKSUMS, compare_folder, digest_of
from flodl_hf.errors import ExportError
from flodl_hf.models.building import open_weights

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel

__all__ = ["Check", "Verification", "verify_export"]

RECEIPT = "verification.json"
ENGINE_FILES = ("onnx/model.onnx", "model.pt2")
"""Weight files in folders for other engines."""
Status = Literal["pass", "fail", "not run"]

# The largest difference between our logits and transformers' that still passes, by dtype. Equal bits are
# expected and reported as such; the bound allows for another torch build, not for another function.
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}


@dataclass
class Check:
    """One comparison.

    Attributes:
        name: the compared property.
        status: "pass", "fail" or "not run".
        detail: description, with the reason if it did not run.
        measured: the largest difference, if measured.
    """

    name: str
    status: Status
    detail: str
    measured: float | None = None


@dataclass
class Verification:
    """All checks of one folder."""

    folder: str
    source: str | None
    checks: list[Check] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether no check failed and at least one ran."""
        return any(c.status == "pass" for c in self.checks) and not any(c.status == "fail" for c in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return the receipt as JSON types."""
        return {"passed": self.passed, **asdict(self)}


def verify_export(
    folder: str | Path,
    *,
    source: str | Path | None = None,
    model: EncoderModel | None = None,
    receipt: bool = True,
    command: str | None = None,
) -> Verification:
    """Return what reopening ``folder`` shows.

    The folder is opened strictly and loaded by us; with a ``source``, names, dtypes and bytes of all
    tensors and the configuration are compared; where transformers is installed, it loads the folder and
    its names, token ids and outputs are compared with those it gives for the source, and with ours. Of a folder of
    sentence-transformers that is each transformer in it.

    Args:
        folder: the export.
        source: local folder that it was exported from.
        model: the live model that was exported; without it the folder is loaded.
        receipt: write ``verification.json`` into the folder.
        command: the calling command, for the receipt.

    Raises:
        ExportError: the folder was exported for another engine; its receipt lists the comparisons.
    """
    place = Path(folder)
    parts = [""]  # also if modules.json is damaged
    with suppress(FlodlError):
        parts = transformer_folders(place)
    held = next((name for name in ENGINE_FILES if (place / name).is_file()), None)
    if held is not None and not any((place / part / name).is_file() for part in parts for name in WEIGHT_FILES):
        found = f"found {held}, written for another engine, without weights; its comparison is in {RECEIPT}"
        expected = "a model's folder. Use `flodl-hf verify` or `flodl-hf verify-endpoint`"
        raise refused(place, found, expected, problems=[held], kind=ExportError)
    base = None if source is None else Path(source)
    result = Verification(str(place.name), None if base is None else str(source))
    single = base if base is None or parts != [""] else transformer_folder(base)
    run = _Run(place, single, model, result)
    if parts == [""]:
        _check(run, CHECKS)
    else:
        _check(run, [_as_written])
        for part in parts:
            found = Verification(part, None)
            origin = base / part if base is not None and (base / part).is_dir() else base
            live = model
            if model is not None and model.routed is not None and model.sentence_recipe is not None:
                live = model if model.sentence_recipe.transformer == part else model.routed.at(part)
            own = _Run(place / part, origin, live, found)
            _check(own, [check for check in CHECKS if check is not _as_written])
            result.checks += [replace(check, name=f"{part}: {check.name}") for check in found.checks]
            run._model = run._model or own._model
    result.facts = _facts(run, command)
    if receipt and place.is_dir():
        write_atomically(place / RECEIPT, [(json.dumps(result.to_dict(), indent=2) + "\n").encode()])
    return result


def _check(run: _Run, checks: Sequence[Callable[[_Run], Iterator[Check]]]) -> None:
    """Make checks in their order; without a folder that opens the others are left out."""
    from flodl_hf.parity.reference import available

    found = run.result.checks
    for check in checks:
        name = check.__name__.strip("_")
        if check in WITH_TRANSFORMERS and not available():
            found.append(Check(name, "not run", "transformers is not installed: pip install 'flodl-hf[parity]'"))
            continue
        try:
            found.extend(check(run))
        except FlodlError as fault:
            found.append(Check(name, "fail", str(fault)))
        if check is _opens and found[-1].status == "fail":
            break


class _Run:
    """State shared by the checks: the two folders and models, each loaded once."""

    def __init__(self, folder: Path, base: Path | None, model: EncoderModel | None, result: Verification) -> None:
        self.place, self.base, self.result = folder, base, result
        self._model = model
        self.live = model is not None
        self._references: dict[Path, Any] = {}

    @property
    def model(self) -> EncoderModel:
        if self._model is None:
            from flodl_hf.heads.auto import AutoModelForPreTraining, load

            # Both heads of such a class are compared; load uses the more common one.
            both = self.architecture.endswith("ForPreTraining")
            self._model = AutoModelForPreTraining.from_pretrained(self.place) if both else load(self.place)
        return self._model

    @property
    def architecture(self) -> str:
        return read_config_file(self.place).source["architectures"][0]

    def reference(self, folder: Path) -> Any:
        from flodl_hf.parity.reference import load_reference

        if folder not in self._references:
            with open_weights(folder, read_config_file(folder)) as opened:
                pooler = any("pooler" in name for name in opened.manifest.tensors)
            self._references[folder] = load_reference(folder, self.architecture, pooler=pooler)
        return self._references[folder]


def _opens(run: _Run) -> Iterator[Check]:
    with Checkpoint.open(run.place) as opened:
        count = len(opened.manifest.tensors)
    report = run.model.load_report
    extra = "" if report is None or not report.ignored else f", {len(report.ignored)} of them not used by the model"
    yield Check("opens", "pass", f"{count} tensors{extra}, loaded as {run.model.head}")


def _as_written(run: _Run) -> Iterator[Check]:
    name = "files as they were written"
    if not (run.place / CHECKSUMS).is_file():
        yield Check(name, "not run", f"there is no {CHECKSUMS}")
        return
    found = compare_folder(run.place)
    detail = "; ".join(map(str, found.faults)) or f"{len(found.files)} files: lengths and SHA-256"
    yield _verdict(name, found.whole, detail)


def _bytes(run: _Run) -> Iterator[Check]:
    if run.base is None:
        yield Check("tensors equal the source's", "not run", "no source was given")
        return
    with Checkpoint.open(run.place) as ours, open_weights(run.base, read_config_file(run.base)) as theirs:
        a, b = ours.manifest.tensors, theirs.manifest.tensors
        lost, added = [n for n in b if n not in a], [n for n in a if n not in b]
        other = [n for n in a if n in b and (a[n].dtype != b[n].dtype or a[n].shape != b[n].shape)]
        both = [n for n in a if n in b and n not in other]
        left, right = ours.read_all(both), theirs.read_all(both)
        differing = [n for n in both if not same_bits(left[n], right[n])]
    groups = {"lost": lost, "added": added, "of another dtype or shape": other, "with other bytes": differing}
    faults = [f"{len(names)} {what} ({', '.join(names[:3])})" for what, names in groups.items() if names]
    detail = "; ".join(faults) or f"{len(both)} tensors: names, dtypes, shapes and bytes"
    yield _verdict("tensors equal the source's", not faults, detail)
    here, there = read_config_file(run.place).source, read_config_file(run.base).source
    changed = sorted(key for key in {*here, *there} if here.get(key, ...) != there.get(key, ...))
    detail = f"changed: {', '.join(changed)}" if changed else f"{len(here)} values"
    yield _verdict("config.json equals the source's", not changed, detail)


def _keys(run: _Run) -> Iterator[Check]:
    found = run.reference(run.place)
    allowed = run.reference(run.base).unexpected if run.base is not None else []
    # A source written for more heads than one gives the same surplus names on both sides.
    surplus = [name for name in found.unexpected if name not in allowed]
    faults = [
        f"{len(n)} {what}: {', '.join(n[:4])}" for what, n in (("missing", found.missing), ("unexpected", surplus)) if n
    ]
    shared = len(found.unexpected) - len(surplus)
    detail = "0 missing, 0 unexpected" + (f" ({shared} surplus names as in the source)" if shared else "")
    yield _verdict("transformers loads every key", not faults, "; ".join(faults) or detail)


def _tokens(run: _Run) -> Iterator[Check]:
    from flodl_hf.parity.cell import AWKWARD_TEXTS
    from flodl_hf.parity.reference import reference_ids, version

    if run.model.tokenizer is None:
        yield Check("token ids", "not run", "the folder has no tokenizer")
        return
    texts: list[str] = list(AWKWARD_TEXTS)
    theirs = reference_ids(run.place, texts)
    if run.base is not None:
        same = theirs == reference_ids(run.base, texts)
        yield _verdict("transformers' token ids equal the source's", same, f"{len(texts)} texts")
    ours = [list(row[0].ids) for row in run.model.tokenizer.encode_rows(texts)]
    parted = [text for text, a, b in zip(texts, ours, theirs, strict=True) if a != b]
    # tokenizer.json is the truth; transformers 5 rebuilds some tokenizers from class code instead.
    detail = f"{len(texts)} texts" if not parted else (
        f"transformers {version()} gives other ids for {len(parted)} of {len(texts)} texts, e.g. {parted[0]!r}; "
        "tokenizer.json is obeyed here"
    )  # fmt: skip
    yield Check("our token ids equal transformers'", "pass" if not parted else "not run", detail)


def _outputs(run: _Run) -> Iterator[Check]:
    from flodl_hf.parity.cell import as_choices, awkward_batches

    exported = run.reference(run.place)
    model, training = run.model, run.model.training
    model.eval()
    gap, equal, count = 0.0, True, 0
    source_equal = True
    device = model.device
    batches = awkward_batches(model.config)
    for batch in map(as_choices, batches) if model.head == "multiple_choice" else batches:
        expected = exported(batch.inputs)
        if run.base is not None:
            again = run.reference(run.base)(batch.inputs)
            source_equal &= all(torch.equal(expected[k], again[k]) for k in expected)
        with torch.no_grad():
            found = dict(model(**{k: v.to(device) for k, v in batch.inputs.items()}).items())
        for key, theirs in expected.items():
            if not isinstance(theirs, Tensor):
                continue
            mine = found[key].cpu() if key in found else None
            equal &= mine is not None and torch.equal(mine, theirs)
            gap = max(gap, _distance(mine, theirs))
            count += 1
    model.train(training)
    if run.base is not None:
        yield _verdict("transformers' outputs equal the source's", source_equal, f"{count} outputs, to the bit")
    bound = BOUNDS.get(model.dtype, 1e-5)
    what = "the live model's" if run.live else "our"
    detail = "equal to the bit" if equal else f"largest difference {gap:.3g}, bound {bound:g}"
    yield _verdict(f"{what} outputs equal transformers'", gap <= bound, f"{count} outputs, {detail}", gap)


def _verdict(name: str, passed: bool, detail: str, measured: float | None = None) -> Check:
    return Check(name, "pass" if passed else "fail", detail, measured)


def _distance(one: Tensor | None, other: Tensor) -> float:
    """Return the largest difference; endless where one is absent, of another shape, or no number where it should be."""
    if one is None or one.shape != other.shape:
        return math.inf
    left, right = one.double(), other.double()
    apart = (left - right).abs().masked_fill(left == right, 0.0)  # two infinities of one sign are equal
    apart = apart.masked_fill(left.isnan() & right.isnan(), 0.0)
    return float(apart.nan_to_num(math.inf, math.inf).max()) if apart.numel() else 0.0


WITH_TRANSFORMERS: Sequence[Callable[[_Run], Iterator[Check]]] = (_keys, _tokens, _outputs)
CHECKS = (_opens, _as_written, _bytes, *WITH_TRANSFORMERS)


def _facts(run: _Run, command: str | None) -> dict[str, Any]:
    from flodl_hf.parity.reference import available, version

    files = sorted(p for p in run.place.rglob("*") if p.is_file() and p.name != RECEIPT) if run.place.is_dir() else []
    model = run._model
    return {
        "sha256": {p.relative_to(run.place).as_posix(): digest_of(p) for p in files},
        "versions": versions() | {"transformers": version() if available() else None},
        "device": None if model is None else str(model.device),
        "dtype": None if model is None else str(model.dtype).removeprefix("torch."),
        "command": command,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def versions() -> dict[str, Any]:
    """Return the versions of Python, torch and this package, for a receipt."""
    return {"python": platform.python_version(), "torch": torch.__version__, "flodl-hf": own_version()}
