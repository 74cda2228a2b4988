"""Who is put to the test: this library, and others on the same cases.

A subject loads a folder as its users do and answers; which errors are of its own kind is its to say. For other
libraries every ``OSError``, ``ValueError`` and error class of a library counts as meant for the user, and a message
is good where it names file and key: more is not asked of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from flodl.errors import FlodlError, nearest

__all__ = ["SUBJECTS", "Ours", "Safetensors", "SentenceTransformers", "Subject", "Transformers", "subject_named"]

# Errors by which Python itself says that something went wrong where nobody thought of it.
_BARE = (
    KeyError, IndexError, AttributeError, TypeError, ZeroDivisionError, AssertionError, RecursionError,
    NotImplementedError, UnboundLocalError, StopIteration,
)  # fmt: skip


class Subject(Protocol):
    """A library that loads folders and answers."""

    name: str

    def lacking(self) -> str | None:
        """Return what has to be installed first, or None."""
        ...

    def prepare(self) -> None:
        """Import what is needed, before processes are forked; nothing runs yet."""
        ...

    def typed(self, error: BaseException) -> bool:
        """Return whether an error is of the library's own kind."""
        ...

    def load(self, folder: Path, head: str, *, tokenizer: bool = True) -> Any:
        """Return the model of a folder for a head, with its tokenizer, as a user loads it."""
        ...

    def tensors(self, model: Any) -> Mapping[str, Tensor]:
        """Return the model's weights by the names of its file."""
        ...

    def ids(self, model: Any, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts."""
        ...

    def scores(self, model: Any, ids: Tensor) -> Tensor:
        """Return the model's first output for ids, ``(batch, seq)``."""
        ...

    def answers(self, model: Any, texts: Sequence[str]) -> Tensor:
        """Return the model's first output for texts, each by itself, end to end."""
        ...

    def save(self, model: Any, folder: Path) -> None:
        """Write the model to a folder, over what is there."""
        ...


class Ours:
    """This library."""

    name = "ours"

    def lacking(self) -> str | None:
        """Return None."""
        return None

    def prepare(self) -> None:
        """Import what calls would import."""
        for module in (
            "flodl_hf",
            "flodl_hf.tokenizer",
            "flodl_hf.runtime",
            "flodl_hf.export",
            "flodl_hf.weights.pickle_free",
        ):
            import_module(module)

    def typed(self, error: BaseException) -> bool:
        """Return whether it is a `FlodlError`."""
        return isinstance(error, FlodlError)

    def load(self, folder: Path, head: str, *, tokenizer: bool = True) -> Any:
        """Return the model of a folder."""
        from flodl_hf import load

        return load(folder, head=head)

    def tensors(self, model: Any) -> Mapping[str, Tensor]:
        """Return weights by stored names."""
        return {stored: model.graph.get_parameter(name).detach() for name, stored in model.source.placed.items()}

    def ids(self, model: Any, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts."""
        tokenizer = model.ready("ids")
        return [list(tokenizer(text)["input_ids"]) for text in texts]

    def scores(self, model: Any, ids: Tensor) -> Tensor:
        """Return the first output."""
        with torch.no_grad():
            return model(input_ids=ids)[0]

    def answers(self, model: Any, texts: Sequence[str]) -> Tensor:
        """Return the outputs of texts."""
        found = []
        for text in texts:
            with torch.no_grad():
                found.append(
                    model(**model.tokenizer(text, return_tensors="pt", truncation=True, max_length=32))[0].reshape(-1)
                )
        return torch.cat(found)

    def save(self, model: Any, folder: Path) -> None:
        """Write the model."""
        model.save_pretrained(folder, overwrite=True)


class Transformers:
    """transformers, used as its documentation says."""

    name = "transformers"

    def lacking(self) -> str | None:
        """Return transformers' name where it is absent."""
        return None if find_spec("transformers") else "transformers"

    def prepare(self) -> None:
        """Import it."""
        from flodl_hf.parity.reference import prepare_user

        prepare_user()

    def typed(self, error: BaseException) -> bool:
        """Return whether a user is meant by it."""
        if isinstance(error, _BARE):
            return False
        library = type(error).__module__.partition(".")[0]
        return isinstance(error, (OSError, ValueError)) or library not in ("builtins", "pyo3_runtime")

    def load(self, folder: Path, head: str, *, tokenizer: bool = True) -> Any:
        """Return the model of a folder."""
        from flodl_hf.parity.reference import load_as_user

        return load_as_user(folder, head, tokenizer=tokenizer)

    def tensors(self, model: Any) -> Mapping[str, Tensor]:
        """Return weights by stored names."""
        return dict(model.model.state_dict())

    def ids(self, model: Any, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts."""
        return [list(model.tokenizer(text)["input_ids"]) for text in texts]

    def scores(self, model: Any, ids: Tensor) -> Tensor:
        """Return the first output."""
        with torch.no_grad():
            return model.model(input_ids=ids)[0]

    def answers(self, model: Any, texts: Sequence[str]) -> Tensor:
        """Return the outputs of texts."""
        found = []
        for text in texts:
            with torch.no_grad():
                found.append(
                    model.model(**model.tokenizer(text, return_tensors="pt", truncation=True, max_length=32))[
                        0
                    ].reshape(-1)
                )
        return torch.cat(found)

    def save(self, model: Any, folder: Path) -> None:
        """Write the model."""
        model.model.save_pretrained(folder)
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(folder)


class SentenceTransformers(Transformers):
    """sentence-transformers, for folders of vectors."""

    name = "sentence-transformers"

    def lacking(self) -> str | None:
        """Return its name where it is absent."""
        return None if find_spec("sentence_transformers") else "sentence-transformers"

    def prepare(self) -> None:
        """Import it."""
        import_module("sentence_transformers")

    def load(self, folder: Path, head: str, *, tokenizer: bool = True) -> Any:
        """Return the encoder of a folder."""
        return import_module("sentence_transformers").SentenceTransformer(
            str(folder), device="cpu", local_files_only=True
        )

    def tensors(self, model: Any) -> Mapping[str, Tensor]:
        """Return weights by stored names."""
        return dict(model[0].auto_model.state_dict())

    def ids(self, model: Any, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts."""
        return [model.tokenizer(text)["input_ids"] for text in texts]

    def answers(self, model: Any, texts: Sequence[str]) -> Tensor:
        """Return the vectors of texts."""
        return torch.cat([torch.as_tensor(model.encode(text)).reshape(-1) for text in texts])

    def save(self, model: Any, folder: Path) -> None:
        """Write the encoder."""
        model.save(str(folder))


class Safetensors(Transformers):
    """The safetensors library alone; it reads files and knows no models."""

    name = "safetensors"

    def lacking(self) -> str | None:
        """Return None: this library needs it."""
        return None

    def prepare(self) -> None:
        """Import it."""
        import_module("safetensors.torch")

    def read(self, path: Path) -> dict[str, Tensor]:
        """Return a file's tensors."""
        from safetensors.torch import load_file

        return load_file(path)


SUBJECTS: Mapping[str, type[Any]] = {
    kind.name: kind for kind in (Ours, Transformers, SentenceTransformers, Safetensors)
}
"""The subjects by name."""


def subject_named(name: str) -> Subject:
    """Return a subject.

    Raises:
        ValueError: there is none of that name, or it is not installed.
    """
    kind = SUBJECTS.get(name)
    if kind is None:
        raise ValueError(f"no subject {name!r}{nearest(name, SUBJECTS)}; expected one of {', '.join(SUBJECTS)}")
    subject: Subject = kind()
    lacking = subject.lacking()
    if lacking:
        raise ValueError(f"{name}: {lacking} is not installed; install it with: pip install {lacking}")
    return subject
