"""Vectors with few bytes: their form in parts and in the output of `flodl_hf.jobs.encode_file`.

float16 and bits are final in parts. int8 and uint8 need the minimum and maximum of every feature, so parts contain
float32 numbers that are quantized when all parts are finished; the ranges are written next to the output
(`ranges_path`). `.npy` is written here, rows of other formats by `write`.
"""

from __future__ import annotations

import io
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flodl.errors import DataError
from flodl.files import write_atomically
from flodl_hf.inference.quantize import quantize_embeddings, ranges_of
from flodl_hf.inference.vector_files import ranges_path
from flodl_hf.jobs.tables import Kind, swapped_column
from flodl_hf.jobs.tasks import VECTOR
from flodl_hf.jobs.write import Pieces, Writer, writer_for
from flodl_hf.tokenization.readers.rows import RowFault

Vectors = NDArray[Any]


def vector_writer(
    format: str,
    keep: tuple[str, ...] | None,
    answer: Mapping[str, Kind],
    target: Path,
    *,
    with_errors: bool,
    **rows: Any,
) -> Writer:
    """Return the writer of a job: `write.writer_for` with support of vectors with few bytes.

    Args:
        format: format of the output.
        keep: columns of the input that are kept; None for all columns of each row.
        answer: result columns; of type "vector:PRECISION:SIZE" for stored vectors.
        target: the output.
        with_errors: add a column with the error of rows without a result.
        **rows: see `write.writer_for`.

    Raises:
        DataError: the format does not support the columns.
    """
    kind = answer.get(VECTOR)
    stored = isinstance(kind, str) and kind.startswith("vector:")
    if format == "npy" and (not stored or keep or keep is None or with_errors):
        found = "results" if not stored else "a column error (on_error is 'null')" if with_errors else "columns to keep"
        raise DataError(
            f"{target}: found {found}, expected only vectors for .npy. Keep no columns, or write another format.",
            path=str(target),
        )
    if not stored:
        return writer_for(format, keep, answer, with_errors=with_errors, **rows)
    _, precision, size = str(kind).split(":")
    counted = precision in ("int8", "uint8")
    held = "float32" if counted else {"binary": "int8", "ubinary": "uint8"}.get(precision, precision)
    final = precision if counted else held
    if format == "npy":
        return _Numpy(target, np.dtype(held), np.dtype(final), int(size), precision if counted else None)
    make = partial(writer_for, format, keep, with_errors=with_errors, **rows)
    if not counted:
        return make({VECTOR: f"vector:{held}:{size}"})
    of_lines = format == "jsonl"
    parts = make({VECTOR: "packed" if of_lines else f"vector:float32:{size}"})
    swap = _swapped_lines if of_lines else partial(swapped_column, name=VECTOR)
    return _QuantizedLater(parts, make({VECTOR: f"vector:{final}:{size}"}), swap, precision, target)


def _quantizer(precision: str, target: Path, arrays: Iterable[Vectors]) -> Callable[[Vectors], Vectors]:
    """Return the quantization by the ranges of all vectors, which are written next to the output."""
    ranges: Vectors | None = None
    for vectors in arrays:
        if len(vectors):
            own = ranges_of(vectors)
            ranges = own if ranges is None else np.stack([np.minimum(ranges[0], own[0]), np.maximum(ranges[1], own[1])])
    if ranges is not None:
        sink = io.BytesIO()
        np.save(sink, ranges)
        write_atomically(ranges_path(target), [sink.getvalue()])
    return lambda vectors: quantize_embeddings(vectors, precision, ranges=ranges)


class _Numpy(Writer):
    """Writer of an array with all vectors."""

    def __init__(self, target: Path, held: np.dtype[Any], final: np.dtype[Any], size: int, counted: str | None) -> None:
        self._target, self._held, self._final, self._size, self._counted = target, held, final, size, counted

    def lines(self, leading: Sequence[None], answers: Sequence[tuple[Any, ...]]) -> list[bytes]:
        rows = np.stack([vector for (vector,) in answers])
        if rows.dtype.kind == "f" and not np.isfinite(rows).all():
            raise RowFault("the vector contains values that are not finite")
        return [rows.astype(self._held, copy=False).tobytes()]

    def joined(self, parts: Pieces) -> Iterator[bytes]:
        rows = parts.size // (self._held.itemsize * self._size)
        head = io.BytesIO()
        header = {"descr": np.lib.format.dtype_to_descr(self._final), "fortran_order": False}
        np.lib.format.write_array_header_1_0(head, {**header, "shape": (rows, self._size)})
        yield head.getvalue()
        if self._counted is None:
            yield from super().joined(parts)
            return
        count = _quantizer(self._counted, self._target, map(self._array, parts))
        for part in parts:
            yield count(self._array(part)).tobytes()

    def _array(self, part: Iterable[bytes]) -> Vectors:
        return np.frombuffer(b"".join(part), self._held).reshape(-1, self._size)


class _QuantizedLater(Writer):
    """Writer that quantizes vectors when all parts are finished."""

    def __init__(
        self, parts: Writer, whole: Writer, swap: Callable[..., tuple[bytes, Vectors]], precision: str, target: Path
    ) -> None:
        self._whole, self._swap, self._precision, self._target = whole, swap, precision, target
        self.keep, self.misfits = parts.keep, parts.misfits
        self.missing, self.lines, self.part = parts.missing, parts.lines, parts.part

    def joined(self, parts: Pieces) -> Iterator[bytes]:
        found = (self._swap(b"".join(part), None)[1] for part in parts)
        count = _quantizer(self._precision, self._target, found)
        yield from self._whole.joined(Pieces(lambda: ([self._swap(b"".join(part), count)[0]] for part in parts)))


def _swapped_lines(part: bytes, change: Callable[[Vectors], Vectors] | None) -> tuple[bytes, Vectors]:
    """Return lines with other vectors, and the previous vectors; without ``change`` no lines."""
    lead = f'"{VECTOR}": '.encode()
    lines = [line + b"\n" for line in part.split(b"\n")[:-1]]
    # Kept columns precede the result, and quotation marks in texts are escaped.
    starts = [line.rindex(lead) + len(lead) for line in lines]
    ends = [line.index(b'"', start + 1) + 1 if line[start : start + 1] == b'"' else 0
            for line, start in zip(lines, starts, strict=True)]  # fmt: skip
    raw = [np.frombuffer(b64decode(line[start:end]), np.float32)
           for line, start, end in zip(lines, starts, ends, strict=True) if end]  # fmt: skip
    vectors = np.stack(raw) if raw else np.zeros((0, 0), np.float32)
    if change is None:
        return b"", vectors
    made = iter(change(vectors).astype(str)) if raw else iter(())
    return b"".join(
        line[:start] + b"[" + ", ".join(next(made)).encode() + b"]" + line[end:] if end else line
        for line, start, end in zip(lines, starts, ends, strict=True)
    ), vectors
