"""A folder as an endpoint: run by sentence-transformers if it is installed, else by this package."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flodl_hf.parity.endpoint_checks.targets import QUERY, TargetError, by_label


class FolderTarget:
    """A folder, answered by sentence-transformers where it is installed and the folder is its own, else by us.

    Args:
        place: the folder.
        task: "vectors", "labels" or "ranking".
        labels: of the source.
    """

    scales = False

    def __init__(self, place: Path, task: str, labels: Sequence[str]) -> None:
        from flodl_hf.auto import load

        self._task, self._labels = task, list(labels)
        self._theirs: Any = None
        reader = "flodl-hf"
        if (
            task == "vectors"
            and (place / "modules.json").exists()
            and importlib.util.find_spec("sentence_transformers")
        ):
            self._theirs = importlib.import_module("sentence_transformers").SentenceTransformer(
                str(place), device="cpu", local_files_only=True, trust_remote_code=False
            )
            reader = "sentence-transformers"
        self._ours: Any = load(place, device="cpu", local_files_only=True)
        self._ours.runtime(progress=False)
        wanted = {"vectors": "base"}.get(task, "sequence_classification")
        if self._ours.head != wanted:
            raise TargetError(
                f"{place}: the folder has a model for {self._ours.head}; expected {wanted}, as the source has",
                status=0,
            )
        self.name = f"{place} (read by {reader})"

    def answers(self, items: Sequence[str], **options: Any) -> np.ndarray:
        """Return a row of numbers for each item."""
        if options:
            raise TargetError(f"a folder has no {', '.join(options)}", status=0)
        if self._task == "ranking":
            found = np.zeros((len(items), 1))
            for one in self._ours.rerank(QUERY, list(items)):
                found[one.index] = one.score
            return found
        if self._task == "labels":
            rows = self._ours.predict(list(items))
            return by_label([[(one.label, one.score) for one in row] for row in rows], self._labels)
        if self._theirs is not None:
            return np.asarray(self._theirs.encode(list(items), show_progress_bar=False), np.float32)
        return self._ours.encode(list(items))

    def token_ids(self, texts: Sequence[str]) -> list[list[int]] | None:
        """Return the ids of texts from the tokenizer of the folder's library."""
        if self._theirs is not None:
            return [list(self._theirs.tokenizer(text)["input_ids"]) for text in texts]
        return [list(row.ids) for (row,) in self._ours.tokenizer.encode_rows(list(texts), offsets=False)]
