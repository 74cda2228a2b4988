"""A folder's tensors and a model's: which belongs to which, decided from headers before a weight is read.

Pure bookkeeping over names, shapes and dtypes. Reading bytes is `flodl_hf.checkpoints.weights.manifest`'s, building
and filling the model is `flodl_hf.models`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flodl.errors import CheckpointError, capped, nearest, printable
from flodl_hf.checkpoints.weights.loaded import LoadReport
from flodl_hf.checkpoints.weights.manifest import StoredTensor
from flodl_hf.families.schema import Family
from flodl_hf.families.schema.record import KeyMap, Tie, changes_a_layer, ignored_reason, repeated_bias
from flodl_hf.families.schema.tasks import HEADS
from flodl_hf.nn.joined_tensors import named_part, part_of

FLOATS = ("F16", "BF16", "F32", "F64")
# What our names of a task's own tensors begin with.
_HEAD = ("head.", "relation.")
_PROBLEMS = ("unexpected", "wrong shape", "wrong dtype", "named twice", "missing")
_LEGACY = ((".gamma", ".weight"), (".beta", ".bias"))
# What wrappers put before every name: data parallel training, compiled modules.
_WRAPPERS = ("module.", "_orig_mod.", "model.")


@dataclass(frozen=True)
class Plan:
    """Which stored tensor fills which parameter, and the comparisons to make once the values are loaded.

    Attributes:
        placed: our name -> stored name.
        ties: ties to create; ``compare`` names both stored tensors when the file has two.
        duplicates: stored names that repeat another: ``(repeated, kept)``.
        report: the report so far.
        stored: the headers for the names above: of the file, and of slices of its tensors.
    """

    placed: dict[str, str]
    ties: tuple[Tie, ...]
    compare: tuple[tuple[Tie, str, str], ...]
    duplicates: tuple[tuple[str, str], ...]
    report: LoadReport
    stored: Mapping[str, StoredTensor]


def head_of(family: Family, architectures: object, wanted: str | None = None) -> str | None:
    """Return the task for ``architectures`` of a config: a head's name, "base", or None.

    Args:
        family: the family of the classes.
        architectures: the value in ``config.json``.
        wanted: the task to use if a class matches several.
    """
    name = class_of(architectures)
    if name is None:
        return None
    suffix = name.removeprefix(family.class_prefix) if name.startswith(family.class_prefix) else None
    named = [head.name for head in HEADS if head.hf_suffix == suffix]
    held = [head for head in named if head == "base" or head in family.heads]
    if wanted in held:
        return wanted
    if name in family.pretraining:
        return family.pretraining[name]
    # A suffix that several tasks share identifies none of them if the family has no such task.
    return held[0] if held else named[0] if len(named) == 1 else None


def class_of(architectures: object) -> str | None:
    """Return the class that ``architectures`` of a config names first, or None."""
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        return architectures[0]
    return None


class _Names:
    """Every Hugging Face name that a file of this family may contain, and its meaning for one head."""

    def __init__(self, family: Family, config: Any, key_map: KeyMap, targets: Iterable[str], head: str) -> None:
        self.family = family
        self.key_map = key_map
        self.wanted = {theirs: ours for ours, theirs in key_map.names(targets).items()}
        # Names of stored tensors that combine several of ours, with the names of the slices.
        self.wholes: dict[str, list[str]] = {}
        for theirs in self.wanted:
            if (part := part_of(theirs)) is not None:
                self.wholes.setdefault(part.whole, []).append(theirs)
        self.also = {other: theirs for theirs, ours in self.wanted.items() for other in key_map.also(ours)}
        self.aliases = {} if head == "base" else dict(family.heads[head].aliases)
        self.reasons = {
            entry.name.format(**holes): entry.reason
            for entry in family.ignored
            for holes in (family.indices(config) if "{" in entry.name else [{}])
        }
        every = [*family.kept, *(kept for spec in family.heads.values() for kept in spec.kept)]
        self.reasons |= {name: kept.reason for kept in every for name in (kept.name, *kept.also)}
        self.pooler = {row.theirs for row in family.keys if row.ours.startswith("pooler")}
        prefix = family.base_prefix + "."
        self.parts = {row.theirs.removeprefix(prefix).partition(".")[0] for row in family.keys}
        self.parts |= {family.base_prefix, *family.prefixes}
        self.head_parts = {theirs.partition(".")[0] for theirs, ours in self.wanted.items() if ours.startswith(_HEAD)}
        self.other_heads: dict[str, str] = {}
        for name, spec in family.heads.items():
            if name == head:
                continue
            for theirs in (*(row.theirs for row in spec.keys), *(alias for alias, _ in spec.aliases)):
                self.other_heads.setdefault(theirs, name)

    def wants(self, name: str) -> bool:
        """Return whether a canonical name is of a tensor that this head has."""
        return name in self.wanted or name in self.wholes or name in self.aliases

    def of_encoder(self, name: str) -> bool:
        """Return whether a stored name, known or not, is inside the encoder: below one of its modules."""
        return any(one.partition(".")[0] in self.parts for one in (name, *_unwrapped(name)))

    def outside(self, name: str) -> bool:
        """Return whether an unknown stored name is outside the encoder and the head."""
        own = any(one.partition(".")[0] in self.head_parts for one in (name, *_unwrapped(name)))
        return not (own or self.of_encoder(name) or changes_a_layer(name))

    def reason(self, name: str) -> str | None:
        """Return why a tensor of this canonical name is not used, or None if it is unknown."""
        if name in self.reasons:
            return self.reasons[name]
        module = name.rpartition(".")[0]
        if name in self.pooler or module in self.pooler:
            return "the pooler is not used by this head"
        other = self.other_heads.get(name) or self.other_heads.get(module)
        return None if other is None else f"belongs to the {other} head"

    def canonical(self, stored: str) -> str | None:
        """Return the current full name of a stored one, or None if it is unknown."""
        prefix = self.family.base_prefix + "."
        shapes = [stored, *_unwrapped(stored)]
        others = [other + "." for other in self.family.prefixes]
        shapes += [s.removeprefix(other) for s in shapes for other in others if s.startswith(other)]
        for name in [*shapes, *(prefix + s for s in shapes)]:
            meant = [name, *(name[: -len(old)] + new for old, new in _LEGACY if name.endswith(old))]
            # Names of the requested head take precedence over equal names of another head.
            if found := next((one for one in meant if self.wants(one)), None):
                return found
            if name in self.also:
                return self.also[name]
            if found := next((one for one in meant if self.reason(one) is not None), None):
                return found
        return None


def _unwrapped(stored: str) -> list[str]:
    """Return a name without what wrappers put before it, one layer of them after another."""
    found: list[str] = []
    left = [stored]
    while left:
        name = left.pop()
        within = [name[len(w) :] for w in _WRAPPERS if name.startswith(w)]
        found += within
        left += within
    return found


def canonical_names(family: Family, key_map: KeyMap, targets: Iterable[str], *, bare: bool) -> dict[str, str]:
    """Return our names with the Hugging Face names a fresh file gives them.

    Args:
        family: provides the rows.
        key_map: the names of the model.
        targets: our tensors.
        bare: omit the family's prefix, as files of a base model do.
    """
    prefix = family.base_prefix + "."
    names = key_map.names(targets)
    return {ours: theirs.removeprefix(prefix) if bare else theirs for ours, theirs in names.items()}


def plan_load(
    family: Family,
    key_map: KeyMap,
    targets: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, StoredTensor],
    *,
    head: str,
    source_head: str | None,
    tie_words: bool,
    source: str,
    renew: Iterable[str] = (),
    config: Any = None,
    custom: str | None = None,
    settled: bool = False,
) -> Plan:
    """Return what fills what.

    Args:
        family: the architecture.
        key_map: names of the model that is to be filled.
        targets: our tensors with their shapes, repeated names of tied tensors included.
        stored: the file's tensors in file order.
        head: the task the model is for.
        source_head: the task the file was written for; None when unknown.
        tie_words: whether the configuration ties words.
        source: the source, for messages.
        renew: prefixes of our tensors that start fresh if the stored shape does not fit.
        config: the family's settings.
        custom: the class the file was written for, if it is not one of ours: its tensors outside the encoder
            are not used.
        settled: tensors outside the model are known to be unused: they are ignored and reported.

    Raises:
        CheckpointError: missing, unexpected or mis-shaped tensors; all of them are listed. ``headless`` is True
            if only the head is missing.
    """
    names = _Names(family, config, key_map, targets, head)
    stored = _with_parts(stored, names)
    matching = _Matching(names, targets, LoadReport(source, head, source_head), tuple(renew), custom, settled)
    for name, tensor in stored.items():
        matching.take(name, tensor)
    ties, compare = _tied(family.heads[head].ties if head != "base" and tie_words else (), matching.placed)
    covered = {tie.also for tie in ties}
    matching.complete(covered)
    matching.settle(stored)
    if any(matching.problems.values()):
        files = sorted({getattr(tensor, "file", "") for tensor in stored.values()} - {""})
        raise matching.misfit(files, covered)

    report, placed = matching.report, matching.placed
    report.new = tuple(ours for ours in targets if ours in matching.fresh)
    report.matched = {ours: placed[ours] for ours in targets if ours in placed}
    report.tied = tuple(tie.also for tie in ties)
    for ours in report.matched:
        dtype = stored[placed[ours]].dtype
        report.dtypes[dtype] = report.dtypes.get(dtype, 0) + 1
    report.prefixed = any(family.base_prefix + "." in name for name in stored)
    return Plan(placed, tuple(ties), tuple(compare), tuple(matching.repeated), report, stored)


@dataclass
class _Matching:
    """Matching of stored tensors with ours, and the faults found so far.

    Attributes:
        names: meaning of stored names.
        targets: our tensors with their shapes.
        report: collects ignored and renamed tensors.
        renew: prefixes of our tensors that start fresh if the stored shape does not fit.
        custom: the class the file was written for, if it is not one of ours.
        settled: tensors outside the model change no number.
        placed: our names with the stored tensor of each.
        repeated: stored tensors that must equal another, with the other one.
        surplus: unknown stored tensors outside the model.
        biases: stored tensors of a decoder that repeat a head's bias, with its canonical name.
        fresh: our tensors that the file does not fill.
        misfits: ours that are in the file, but not as they should be: named once, not also as missing.
        problems: lines by kind.
    """

    names: _Names
    targets: Mapping[str, tuple[int, ...]]
    report: LoadReport
    renew: tuple[str, ...]
    custom: str | None
    settled: bool = False
    placed: dict[str, str] = field(default_factory=dict)
    repeated: list[tuple[str, str]] = field(default_factory=list)
    surplus: list[str] = field(default_factory=list)
    biases: dict[str, str] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)
    misfits: set[str] = field(default_factory=set)
    problems: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in _PROBLEMS})

    @property
    def _own_head(self) -> bool:
        return self.report.source_head in (None, self.report.head)

    def take(self, name: str, tensor: StoredTensor) -> None:
        """Place a stored tensor, or record why it is not used or its fault."""
        canonical = self.names.canonical(name)
        if canonical is None:
            self._unknown(name, tensor)
            return
        ours = self.names.wanted.get(self.names.aliases.get(canonical) or canonical)
        if ours is None:
            self.report.ignored[name] = self.names.reason(canonical) or "not used"
        # A file of a base model was written for no other head, so the head that it contains is meant.
        elif ours.startswith(_HEAD) and not self._own_head and self.report.source_head != "base":
            written = self.report.source_head
            self.report.ignored[name] = f"written for the {written} head, and this is {self.report.head}"
        elif self._fits(ours, name, tensor):
            self._place(ours, name, canonical)

    def _unknown(self, name: str, tensor: StoredTensor) -> None:
        """Note why a tensor that no row names changes nothing, or that it was not expected."""
        repeated = repeated_bias(name)
        if (why := ignored_reason(name, tensor.dtype)) is not None:
            self.report.ignored[name] = why
        elif repeated and (bias := self.names.canonical(repeated)) is not None:
            self.biases[name] = bias
        elif self.custom is not None and not self.names.of_encoder(name):
            self.report.ignored[name] = f"belongs to {printable(self.custom, 60)}, which is none of our classes"
        elif self.settled and self.names.outside(name):
            self.surplus.append(name)
        else:
            self._unexpected(name, tensor)

    def _unexpected(self, name: str, tensor: StoredTensor) -> None:
        self.problems["unexpected"].append(f"{name} {list(tensor.shape)}{nearest(name, self.names.wanted)}")

    def _fits(self, ours: str, name: str, tensor: StoredTensor) -> bool:
        expected = list(self.targets[ours])
        if tensor.dtype not in FLOATS:
            kind, line = "wrong dtype", f"{name}: found {tensor.dtype}; expected one of {', '.join(FLOATS)}"
        elif list(tensor.shape) == expected:
            return True
        elif self.renew and ours.startswith(self.renew):
            self.fresh.add(ours)
            self.report.ignored[name] = f"has shape {list(tensor.shape)}; the new labels need {expected}"
            return False
        else:
            kind, line = "wrong shape", f"{name}: found {list(tensor.shape)}; expected {expected}"
        self.misfits.add(ours)
        self.problems[kind].append(line)
        return False

    def _place(self, ours: str, name: str, canonical: str) -> None:
        aliases = self.names.aliases
        before = self.placed.setdefault(ours, name)
        if before != name:
            # The reference reads the alias, so it wins; equality is checked on the values.
            keep, drop = (name, before) if canonical in aliases else (before, name)
            if canonical not in aliases and (self.names.canonical(before) or "") not in aliases:
                self.problems["named twice"].append(f"{name} and {before} are both {canonical}")
                return
            self.placed[ours] = keep
            self.repeated.append((drop, keep))
        if canonical != name and canonical.removeprefix(self.names.family.base_prefix + ".") != name:
            self.report.renamed[name] = canonical

    def complete(self, covered: set[str]) -> None:
        """Record for each unfilled tensor of ours whether it starts fresh or is missing.

        Args:
            covered: our tensors that are tied to another.
        """
        source_head = self.report.source_head
        found = self.placed.keys() | covered | self.fresh | self.misfits
        has_head = any(ours in self.placed for ours in self._head_names(covered))
        no_head = not self._own_head or (source_head is None and not has_head)
        # A part that the file was never written with may start fresh; half of one may not.
        absent: tuple[str, ...] = ()
        for part, may_be_new in ((_HEAD, no_head), (("pooler.",), source_head != self.report.head)):
            own = (name for name in self.targets if name.startswith(part) and name not in covered)
            if may_be_new and not any(name in self.placed for name in own):
                absent += part
        for ours in self.targets:
            if ours in found:
                continue
            if ours.startswith(absent):
                self.fresh.add(ours)
            else:
                self.problems["missing"].append(f"{self.names.key_map.theirs(ours)} {list(self.targets[ours])}")

    def settle(self, stored: Mapping[str, StoredTensor]) -> None:
        """Record whether repeated biases are compared; ignore tensors outside the model.

        Such a tensor is an error if it may be a missing tensor under another name.
        """
        for name, canonical in self.biases.items():
            kept = self.placed.get(self.names.wanted.get(canonical, ""))
            if kept is not None and tuple(stored[name].shape) == tuple(stored[kept].shape):
                self.repeated.append((name, kept))
            else:
                self.report.ignored[name] = self.names.reason(canonical) or f"{canonical} is read instead"

        lacking = {self.names.key_map.theirs(ours).rpartition(".")[0] for ours in self.fresh}
        if any(self.problems.values()) or any(nearest(name.rpartition(".")[0], lacking) for name in self.surplus):
            for name in self.surplus:
                self._unexpected(name, stored[name])
        else:
            self.report.unexpected = tuple(self.surplus)
            self.report.ignored |= dict.fromkeys(self.surplus, "belongs to no part of this model")

    def misfit(self, files: Sequence[str], covered: set[str]) -> CheckpointError:
        """Return the error with all problems; ``headless`` is True if only the whole head is missing.

        Args:
            files: names of the weight files.
            covered: our tensors that are tied to another.
        """
        source, head, source_head = self.report.source, self.report.head, self.report.source_head
        problems = {kind: lines for kind, lines in self.problems.items() if lines}
        head_names = self._head_names(covered)
        found = self.placed.keys() | covered | self.fresh | self.misfits
        alone = list(problems) == ["missing"] and not any(ours in found for ours in head_names)
        groups = [f"{kind} ({len(lines)}):\n{capped(lines)}" for kind, lines in problems.items()]
        advice = "Check that config.json and the weights belong together and that the download is complete."
        if "missing" not in problems and "wrong shape" in problems:
            advice = "Check num_labels / id2label and the sizes in config.json; for other labels, pass labels=[...]."
        elif "missing" not in problems and "unexpected" in problems:
            advice += (
                " Additional tensors of a layer, as of an adapter, would be missing from its computation: "
                "merge it into the weights, or write the file without it."
            )
        written = f" model, written for {source_head}" if source_head and source_head != head else " model"
        names = ", ".join(map(printable, files[:3])) or "the file"
        return CheckpointError(
            f"{source}: the tensors of {names} do not fit a {head}{written}; "
            f"expected those in config.json.\n{chr(10).join(groups)}\nNothing was loaded. {advice}",
            where=source,
            problems=[line for lines in problems.values() for line in lines],
            groups=self.problems,
            headless=alone and len(problems["missing"]) == len(head_names) > 0,
        )

    def _head_names(self, covered: set[str]) -> list[str]:
        return [ours for ours in self.targets if ours.startswith(_HEAD) and ours not in covered]


def _tied(ties: Iterable[Tie], placed: dict[str, str]) -> tuple[list[Tie], list[tuple[Tie, str, str]]]:
    """Return the ties with one stored tensor, now placed; and the ties with both tensors stored."""
    shared, both = [], []
    for tie in ties:
        kept, also = placed.get(tie.kept), placed.get(tie.also)
        if kept and also:
            both.append((tie, kept, also))
        elif kept or also:
            placed[tie.kept] = kept or also or ""
            placed.pop(tie.also, None)
            shared.append(tie)
    return shared, both


def _with_parts(stored: Mapping[str, StoredTensor], names: _Names) -> dict[str, StoredTensor]:
    """Return headers by name, with combined tensors replaced by their slices."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        parts = names.wholes.get(names.canonical(name) or "") if names.wholes else None
        rows = tensor.shape[0] if tensor.shape else 0
        if not parts or rows % len(parts):
            found[name] = tensor
            continue
        part = replace(tensor, shape=(rows // len(parts), *tensor.shape[1:]))
        found |= {named_part(name, like): part for like in parts}
    return found
