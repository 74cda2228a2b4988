"""The rows of a table that another engine holds, answered some at a time: one partition in, the same with answers out.

Decides what a batch of columns becomes, by the columns and tasks of `predict_file`. Which rows come together, what is
run again after a loss, and when outputs count is the engine's business: an answer depends on its row alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from flodl.errors import DataError, capped
from flodl_hf.jobs.columns import ColumnArgs, choose_columns, item_of
from flodl_hf.jobs.tables import Kind, arrow_type
from flodl_hf.jobs.tasks import answerer_for, faulty_items
from flodl_hf.readers.arrow import need_pyarrow
from flodl_hf.readers.rows import RowFault

__all__ = ["Partitions", "split_words"]


class Partitions:
    """A model that answers rows of a table, loaded once and called with one batch after another.

    Args:
        model: a model, or the folder or Hub name of one.
        names: the columns of the table.
        on_error: what becomes of a row that cannot be answered: "stop" ends the engine's task with its reason; "null"
            gives it null answers, and all rows a column ``error``.
        head: the task, where the model is a name.
        device: where to load it.
        **words: the columns, as in `predict_file` (``text_column``, ``question_column``, ...), and options of the
            model's method (``top_k``, ``threshold``, ``normalize``, ``precision``, ...).

    Raises:
        DataError: columns cannot be told, or an answer's name is taken.
        PredictError: the model has no such option.

    Attributes:
        kinds: what each column of an answer holds.
        read: the columns that are read.
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
            from flodl_hf.auto import load

            model = load(str(model), head=head, device=device).runtime(progress=False)
        model.ready("answers", untrained=bool(words.get("untrained")))
        if on_error not in ("stop", "null"):
            raise DataError(f"answers: on_error is {on_error!r}; expected stop or null", problems=["on_error"])
        said, options = split_words(words)
        choice = choose_columns(model.head, names, said, own=False)
        self._model = model
        self._answerer = answerer_for(model, choice, options)
        self._item = item_of(choice)
        self._null = on_error == "null"
        self.read = choice.read
        self.kinds: dict[str, Kind] = dict(self._answerer.columns) | ({"error": "text"} if self._null else {})
        taken = [name for name in self.kinds if name in names]
        if taken:
            raise DataError(
                f"answers: the table has columns {', '.join(taken)} already, expected none of the answer's; "
                "rename them",
                problems=taken,
            )

    def answers(self, columns: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Return the columns of the answers of some rows, given by column.

        Raises:
            DataError: rows cannot be answered, and ``on_error`` is "stop"; they are listed.
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
            told = [f"row {place} of the batch: {reason}" for place, reason in sorted(faults.items())]
            raise DataError(
                f"answers: {len(told)} rows cannot be answered:\n{capped(told)}\nexpected a text in every row; "
                "leave such rows out, or have them null with on_error='null'",
                rows=sorted(faults),
                problems=told,
            )
        nothing = (None,) * len(self._answerer.columns)
        lines = [found.get(place, nothing) for place in range(len(rows))]
        by_column = {name: [line[i] for line in lines] for i, name in enumerate(self._answerer.columns)}
        return by_column | ({"error": [faults.get(place) for place in range(len(rows))]} if self._null else {})

    def _found(self, items: Mapping[int, Any], faults: dict[int, str]) -> dict[int, tuple[Any, ...]]:
        """Return the values of each item by its place, and note in ``faults`` what the model refuses."""
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
        """Return an Arrow table or record batch with the answers' columns behind its own."""
        arrow = need_pyarrow("answers")
        found = self.answers({name: table.column(name).to_pylist() for name in self.read})
        arrays = [arrow.array(values, arrow_type(self.kinds[name])) for name, values in found.items()]
        own = [table.column(name) for name in table.schema.names]
        return type(table).from_arrays([*own, *arrays], names=[*table.schema.names, *found])


def split_words(words: Mapping[str, Any]) -> tuple[ColumnArgs, dict[str, Any]]:
    """Return what was said of columns, and the options that are left; every column of the table is kept."""
    known = [name for name in asdict(ColumnArgs()) if name not in ("keep", "id_column")]
    said = ColumnArgs(**{name: words[name] for name in known if name in words})
    return said, {name: value for name, value in words.items() if name not in known}
