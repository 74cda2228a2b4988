"""Names of tensors: one table that is read in both directions.

A row pairs our prefix with the prefix in Hugging Face files; ``{i}`` stands for the number of a layer. Rows name
modules and cover their ``.weight`` and ``.bias``; a row names a whole tensor where the last parts of the names differ.
The same rows rename tensors when loading and exporting, pair modules when a parity check fails, and are a table in the
documents.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flodl.errors import CheckpointError


@dataclass(frozen=True)
class KeyRow:
    """``ours`` and ``theirs`` are prefixes (modules) or whole tensor names, with ``{placeholders}`` for repeated parts.

    ``[0/3]`` behind a module in ``theirs`` means a part of its tensors (`flodl_hf.nn.layers.parts`).
    """

    ours: str
    theirs: str


@dataclass(frozen=True)
class Tie:
    """Two of our names that share one tensor when the configuration ties them.

    A file must contain ``kept``; ``also`` repeats it.
    """

    kept: str
    also: str


def rows_under(prefix: str, rows: Iterable[KeyRow], moved: Mapping[str, str | None] = {}) -> tuple[KeyRow, ...]:
    """Return rows with another first part of the names in files.

    Args:
        prefix: replaces the first part of each name in files.
        rows: the rows of a similar family.
        moved: our name -> the rest of the name in files; None removes the row.
    """
    found = []
    for row in rows:
        rest = moved.get(row.ours, row.theirs.partition(".")[2])
        if rest is not None:
            found.append(KeyRow(row.ours, f"{prefix}.{rest}"))
    return tuple(found)


class KeyMap:
    """The names of one model in both directions.

    Args:
        rows: the table in the order of the graph, which the parity probe follows.
        indices: the values of the placeholders, one mapping for each layer: ``[{"i": 0}, {"i": 1}, ...]``.
        also: rows of further names of the same modules in files.

    Raises:
        CheckpointError: two rows give the same name on one side.
    """

    def __init__(
        self, rows: Sequence[KeyRow], indices: Sequence[Mapping[str, int]], also: Sequence[KeyRow] = ()
    ) -> None:
        self._also = list(_expand(also, indices))
        self._ours: dict[str, str] = {}
        self._theirs: dict[str, str] = {}
        clashes: list[str] = []
        # Rows with placeholders are repeated for each layer, in the order of the graph.
        for ours, theirs in _expand(rows, indices):
            if ours in self._ours or theirs in self._theirs:
                clashes.append(f"{ours} <-> {theirs}")
                continue
            self._ours[ours] = theirs
            self._theirs[theirs] = ours
        if clashes:
            raise CheckpointError(
                "key rows collide, so names could not be read back: " + ", ".join(clashes), clashes=clashes
            )

    @property
    def pairs(self) -> Mapping[str, str]:
        """Our prefixes with those in files, in the order of the graph."""
        return self._ours

    def theirs(self, name: str) -> str:
        """Return the Hugging Face name of our tensor.

        Raises:
            CheckpointError: no row covers the name.
        """
        found = translated(name, self._ours)
        if found is None:
            raise CheckpointError(f"no key row covers our tensor {name!r}", name=name)
        return found

    def ours(self, name: str) -> str | None:
        """Return our name of a Hugging Face tensor; None if no row covers it."""
        return translated(name, self._theirs)

    def also(self, name: str) -> list[str]:
        """Return the further names of our tensor in files."""
        return [found for ours, theirs in self._also if (found := translated(name, {ours: theirs})) is not None]

    def names(self, tensors: Iterable[str]) -> dict[str, str]:
        """Return ``{our name: their name}`` for all ``tensors``; the names are unique.

        Raises:
            CheckpointError: a tensor has no row, or two tensors share a name.
        """
        result = {name: self.theirs(name) for name in tensors}
        if len(set(result.values())) != len(result):
            raise CheckpointError("two of our tensors have one name in the file", names=sorted(result))
        return result


def _expand(rows: Sequence[KeyRow], indices: Sequence[Mapping[str, int]]) -> Iterable[tuple[str, str]]:
    position = 0
    while position < len(rows):
        if "{" not in rows[position].ours:
            yield rows[position].ours, rows[position].theirs
            position += 1
            continue
        end = position
        while end < len(rows) and "{" in rows[end].ours:
            end += 1
        for holes in indices:
            for row in rows[position:end]:
                yield row.ours.format(**holes), row.theirs.format(**holes)
        position = end


def translated(name: str, table: Mapping[str, str]) -> str | None:
    """Return the name of a tensor on the other side of a table of prefixes; None if no row covers it."""
    whole = table.get(name)
    if whole is not None:
        return whole
    module, _, leaf = name.rpartition(".")
    prefix = table.get(module)
    return None if prefix is None else f"{prefix}.{leaf}"


IGNORED_TENSORS: tuple[tuple[str, str], ...] = (
    ("position_ids", "positions are counted, not stored"),
    ("token_type_ids", "zeros are made when needed"),
    ("inv_freq", "rotary frequencies are computed from config.json"),
    ("cos_cached", "rotary tables are computed from config.json"),
    ("sin_cached", "rotary tables are computed from config.json"),
    *(
        (name, "class weights of a training loss")
        for name in ("loss.weight", "loss_fct.weight", "loss_fn.weight", "criterion.weight", "class_weights")
    ),
)
"""The last words of a name, between dots and underscores, and why the tensor has no effect on numbers."""

WHOLE_NUMBERS = ("I64", "I32", "BOOL")
"""Dtypes of counters and masks; no weight has them."""

# Names of tensors that libraries of adapters and quantisation add to a layer.
_BESIDE = re.compile(
    r"(?:^|[._])(?:lora|ia3|vera|oft|hada|base_layer|modules_to_save|adapters?|prefix_tuning|prompt_encoder|prefix_encoder|"
    r"weight_scale|weight_format|input_scale|quant_map|quant_state|absmax|SCB|qweight|qzeros|scales|zero_point)(?:[._]|$)"
)
_ENDING = re.compile(rf"(?:^|[._])({'|'.join(re.escape(name) for name, _ in IGNORED_TENSORS)})$")


def ignored_reason(name: str, dtype: str) -> str | None:
    """Return why an unknown tensor has no effect on numbers; None if it may have one.

    Args:
        name: the name in the file.
        dtype: the dtype in the header.
    """
    if (found := _ENDING.search(name)) is not None:
        return dict(IGNORED_TENSORS)[found[1]]
    return "counts or masks, which no layer computes with" if dtype in WHOLE_NUMBERS else None


def changes_a_layer(name: str) -> bool:
    """Return whether a tensor belongs to an adapter or a quantised layer, which gives other numbers without it.

    Args:
        name: the name in the file.
    """
    return _BESIDE.search(name) is not None


def repeated_bias(name: str) -> str | None:
    """Return the name of the bias that a tensor ``decoder.bias`` repeats; None for other tensors."""
    module = name.removesuffix(".decoder.bias")
    return None if module == name else f"{module}.bias"
