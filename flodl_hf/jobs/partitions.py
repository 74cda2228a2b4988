"""Predictions for batches of tables of other engines: the columns of a batch in, result columns out.

Columns and tasks are those of `predict_file`. The engine determines batches, retries and commits; a result depends only
on its row.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from flodl.errors import DataError, capped
from flodl_hf.jobs.columns import ColumnArgs, choose_columns, item_of
from flodl_hf.jobs.tables import Kind, arrow_type
from flodl_hf.jobs.tasks import answerer_for, faulty_items, with_old_names
from flodl_hf.tokenization.readers.arrow import need_pyarrow
from flodl_hf.tokenization.readers.rows import RowFault

# Every column of the table is kept.
_COLUMNS = ColumnArgs.__dataclass_fields__.keys() - {"keep", "id_column"}


class Partitions:
    """A model that is loaded once and predicts batches of rows of a table.

    Args:
        model: a model, or its folder or Hub name.
        names: columns of the table.
        on_error: rows that cannot be predicted: "stop" raises an error; "null" gives null results, and adds a column
            ``error``.
        head: task of a model that is given by name.
        device: device on which to load it.
        **words: columns as for `predict_file` (``text_column``, ``question_column``, ...), and options of the model's
            method (``top_k``, ``threshold``, ``normalize``, ``precision``, ...).

    Raises:
        DataError: columns are ambiguous, or have the name of a result column.
        PredictError: the model has no such option.

    Attributes:
        kinds: type of each result column.
        read: the columns that the model reads.
    """

    def __init__(
        self,
        model: Any,
        names: Sequence[str],
        *,
        on_error: Literal["stop", "null"] = "stop",
        head: str = "auto",
        device: str | None = None,
        **words: Any,
    ) -> None:
        if isinstance(model, (str, os.PathLike)):
            from flodl_hf.heads.auto import load

            model = load(str(model), head=head, device=device).runtime(progress=False)
        model._ready("answers", untrained=bool(words.get("untrained")))
        if on_error not in ("stop", "null"):
            raise DataError(f"answers: on_error is {on_error!r}, expected stop or null", problems=["on_error"])
        columns = ColumnArgs(**{name: words.pop(name) for name in list(words) if name in _COLUMNS})
        choice = choose_columns(model.head, names, columns, own=False)
        self._model = model
        options = with_old_names(model, choice.task, words, "answers")
        self._answerer = answerer_for(model, choice, options, "answers")
        self._item = item_of(choice)
        self._null = on_error == "null"
        self.read = choice.read
        self.kinds: dict[str, Kind] = dict(self._answerer.columns) | ({"error": "text"} if self._null else {})
        taken = [name for name in self.kinds if name in names]
        if taken:
            raise DataError(
                f"answers: the table has columns {', '.join(taken)} already, like the result. Rename them.",
                problems=taken,
            )

    def answers(self, columns: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Return the result columns of some rows, given by column.

        Raises:
            DataError: rows cannot be predicted, and ``on_error`` is "stop"; lists the rows.
        """
        rows = list(zip(*(columns[name] for name in self.read), strict=True))
        faults: dict[int, str] = {}
        items: dict[int, Any] = {}
        for place, values in enumerate(rows):
            try:
                items[place] = self._item(dict(zip(self.read, values, strict=True)))
            except RowFault as fault:
                faults[place] = str(fault)
        found = {} if faults and not self._null else self._found(items, faults)
        if faults and not self._null:
            messages = [f"row {place} of the batch: {reason}" for place, reason in sorted(faults.items())]
            raise DataError(
                f"answers: {len(messages)} rows cannot be predicted:\n{capped(messages)}\nexpected a text "
                "in every row. Omit such rows, or set on_error='null'.",
                rows=sorted(faults),
                problems=messages,
            )
        nothing = (None,) * len(self._answerer.columns)
        lines = [found.get(place, nothing) for place in range(len(rows))]
        by_column = {name: [line[i] for line in lines] for i, name in enumerate(self._answerer.columns)}
        return by_column | ({"error": [faults.get(place) for place in range(len(rows))]} if self._null else {})

    def _found(self, items: Mapping[int, Any], faults: dict[int, str]) -> dict[int, tuple[Any, ...]]:
        """Return the values of each input by its index, and add refused inputs to ``faults``."""
        from flodl.errors import FlodlError

        places = list(items)
        try:
            answers = list(self._answerer.run([items[place] for place in places]))
        except FlodlError:
            refused = faulty_items(self._model, self._answerer, [items[place] for place in places])
            if not refused:
                raise
            faults |= {places[index]: reason for index, reason in refused.items()}
            places = [place for place in places if place not in faults]
            answers = list(self._answerer.run([items[place] for place in places]))
        return {place: self._answerer.values(one) for place, one in zip(places, answers, strict=True)}

    def arrow(self, table: Any) -> Any:
        """Return an Arrow table or record batch with the result columns after its own columns."""
        arrow = need_pyarrow("answers")
        found = self.answers({name: table.column(name).to_pylist() for name in self.read})
        arrays = [arrow.array(values, arrow_type(self.kinds[name])) for name, values in found.items()]
        own = [table.column(name) for name in table.schema.names]
        return type(table).from_arrays([*own, *arrays], names=[*table.schema.names, *found])
