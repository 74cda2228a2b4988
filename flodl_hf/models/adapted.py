"""Adapter methods of models; the adapters themselves are implemented in `flodl_hf.models.adapters`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from flodl_hf.inference.graph_model import GraphModel

if TYPE_CHECKING:
    from flodl_hf.models.adapters.attach import Adapters
    from flodl_hf.models.adapters.settings import Settings


WINDOW = 512  # texts of several adapters that run together


class Adapted(GraphModel):
    """A model that adapters can be added to; its own weights stay as they are."""

    @property
    def _held_adapters(self) -> Adapters:
        from flodl_hf.models.adapters.attach import adapters_of

        return adapters_of(self)

    @property
    def adapters(self) -> dict[str, Settings]:
        """Map each adapter's name to its settings."""
        return {name: adapter.settings for name, adapter in self._held_adapters.known.items()}

    @property
    def active_adapter(self) -> str | None:
        """The name of the adapter that the model computes with; None for none."""
        held = self.__dict__.get("_adapters")
        return None if held is None else held.active

    def add_adapter(self, adapter: Settings | None = None, name: str = "default") -> Self:
        """Add a fresh adapter with a copy of the head, and have the model compute with it; returns the model.

        A `Lora` and an `IA3` change nothing before they are trained. Only the adapter and its head learn from then on.

        Args:
            adapter: a `flodl_hf.models.adapters.Lora` (rank, scale, where it goes), `IA3`, `Prompt` or `Prefix`; None
                for the usual `Lora`.
            name: name of the new adapter.

        Raises:
            ConfigError: the name is taken, a target names no projection, or the model takes no such adapter.
        """
        from flodl_hf.models.adapters.fresh import new_adapter
        from flodl_hf.models.adapters.settings import Lora

        with self._taken_out() as held:
            held.add(name, new_adapter(self, adapter or Lora()))
        held.put(self, name)
        return self

    @contextmanager
    def _taken_out(self) -> Iterator[Adapters]:
        """Leave the model without its adapter; restore it if an exception is raised inside."""
        held = self._held_adapters
        before = held.active
        held.take_out(self)
        try:
            yield held
        except BaseException:
            if before is not None:
                held.put(self, before)
            raise

    def load_adapter(self, folder: str | Path, name: str = "default") -> Self:
        """Add an adapter from a folder or Hub repository, and have the model compute with it; returns the model.

        Raises:
            ConfigError: the name is taken, or the folder's settings are not understood.
            CheckpointError: its tensors do not fit the model, or its head is missing.
        """
        from flodl_hf.models.adapters.folder import open_adapter

        opened = open_adapter(folder)
        with self._taken_out() as held:
            own = self.config
            labels = opened.labels(own, self.head)
            try:
                self.config = own.changed(labels=labels) if labels is not None else own
                found = opened.adapter(self)
            finally:
                self.config = own
            held.add(name, found)
        held.put(self, name)
        return self

    def set_adapter(self, name: str | None) -> Self:
        """Have the model compute with another adapter, its head and its labels; None for without; returns the model.

        Raises:
            ConfigError: there is none of this name.
        """
        held = self._held_adapters
        if name is None:
            held.take_out(self)
        else:
            held.put(self, name)
        return self

    @contextmanager
    def disable_adapter(self) -> Iterator[Self]:
        """Have the model compute as it did before adapters, while inside."""
        held = self._held_adapters
        before, merged = held.active, held.merged
        held.take_out(self)
        try:
            yield self
        finally:
            if before is not None and before in held.known:
                held.put(self, before)
                if merged:
                    held.merge(self)

    def predict_mixed(self, texts: Sequence[Any], adapters: Sequence[str], **options: Any) -> list[Any]:
        """Return the `predict` results of each text with its own adapter, several adapters in one batch.

        The base runs once for all rows, concatenated, with torch operators, and each token's sum is added; results
        equal each adapter's alone up to the order of sums. The active adapter stays active.

        Args:
            texts: as for ``predict``, a list.
            adapters: a name for each text.
            **options: options of ``predict``, except those that select how it runs.

        Raises:
            PredictError: the number of names differs, the task has no labels, or the adapters' labels differ.
            ConfigError: there is no adapter of such a name.
        """
        import numpy as np

        from flodl_hf.errors import PredictError
        from flodl_hf.inference.pipeline import STARTS
        from flodl_hf.models.adapters.mixed import Mixed

        texts, given = list(texts), list(adapters)
        if isinstance(adapters, str) or len(texts) != len(given):
            raise PredictError(
                f"predict_mixed: found {len(texts)} texts and {len(given)} names of adapters; expected a list of "
                "names, one for each text",
            )
        if not texts:
            return []
        held, names = self._held_adapters, list(dict.fromkeys(given))
        first, answers = held.named(names[0]), []
        with self.disable_adapter():
            mixed, config = Mixed(self, held, names), self.config
            if first.labels is not None or first.problem_type is not None:
                self.config = config.changed(labels=first.labels, problem_type=first.problem_type)
            untouched, self._untouched = self._untouched, {}
            try:
                for at in range(0, len(texts), WINDOW):
                    chunk = texts[at : at + WINDOW]
                    numbers = np.array([names.index(name) for name in given[at : at + len(chunk)]], np.int64)
                    token = STARTS.set(lambda encoded, work, numbers=numbers: mixed.start(encoded, work, numbers))
                    try:
                        answers += self.predict(chunk, window=WINDOW, **options)  # type: ignore[attr-defined]
                    finally:
                        STARTS.reset(token)
            finally:
                self.config, self._untouched = config, untouched
        return answers

    def remove_adapter(self, name: str = "default") -> Self:
        """Forget an adapter; returns the model.

        Raises:
            ConfigError: there is none of this name.
        """
        self._held_adapters.remove(self, name)
        return self

    def merge_adapter(self) -> Self:
        """Put the adapter's sum into the weights, in float64 and rounded once; returns the model.

        `unmerge_adapter` gives the weights back to the bit; `merge_and_unload` keeps no way back.

        Raises:
            ConfigError: the model computes with no adapter.
        """
        self._held_adapters.merge(self)
        return self

    def unmerge_adapter(self) -> Self:
        """Give the weights back as they were before `merge_adapter`; returns the model."""
        self._held_adapters.unmerge(self)
        return self

    def merge_and_unload(self) -> Self:
        """Make the merged weights and the adapter's head the model's own, and forget all adapters; returns the model.

        Raises:
            ConfigError: the model computes with no adapter.
        """
        self._held_adapters.settle(self)
        return self

    def save_adapter(
        self,
        folder: str | Path,
        name: str | None = None,
        *,
        overwrite: bool = False,
        extra_files: Mapping[str, bytes] | None = None,
    ) -> Path:
        """Write an adapter with its head as peft reads it; return the folder.

        Args:
            folder: where to.
            name: which adapter; None for the one that the model computes with.
            overwrite: replace a folder that contains an adapter or a model.
            extra_files: further files to write into the folder, by file name.

        Raises:
            ConfigError: there is no such adapter.
            ExportError: the folder is in use or not empty, or cannot be written.
        """
        from flodl_hf.models.adapters.write import adapter_contents
        from flodl_hf.models.saving import write_contents

        held = self._held_adapters
        adapter = held.named(name if name is not None else held.active or "default")
        contents = adapter_contents(self, adapter)
        return write_contents(folder, {"": contents}, overwrite=overwrite, extra_files=extra_files)

    def _fixed_names(self) -> frozenset[str]:
        """Return the names of tensors that training does not change, which checkpoints can omit."""
        beside = self.beside
        fixed = beside._fixed_names() if isinstance(beside, Adapted) else ()
        found: Any = () if self.active_adapter is None else self._held_adapters.base_names(self)
        return frozenset([*(f"network.{name}" for name in found), *(f"beside.{name}" for name in fixed)])
