"""Small checkpoints that the suites damage: made here, from a seed, and kept as bytes.

The weights are written by this library and read again by the few lines of `parts_of`, which know the format of
safetensors and nothing else.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.torture.vocabularies import tokenizer_files, vocabulary_of

__all__ = [
    "LABELS",
    "TEXTS",
    "checkpoint",
    "encoded",
    "parts_of",
    "tensors_in",
    "torch_dtype",
    "whole",
    "write_files",
]

LABELS = ("no", "yes", "perhaps")
TEXTS = ("the cat sat on the mat.", "a very good film!", "not bad, is it?", "zzz")

_SIZES = {
    "hidden_size": 8, "num_heads": 2, "intermediate_size": 12,
    "max_positions": 40, "type_vocab_size": 2, "embedding_size": 4,
}  # fmt: skip


@cache
def checkpoint(
    family: str = "bert",
    head: str = "sequence_classification",
    layers: int = 2,
    sort: str = "wordpiece",
    seed: int = 0,
) -> Mapping[str, bytes]:
    """Return the files of a checkpoint by name: ``config.json``, ``model.safetensors`` and a tokenizer.

    Every weight is away from the values that initialisation would give it, so that no two tensors are alike.

    Args:
        family: a model type.
        head: a head's name.
        layers: how many.
        sort: of the tokenizer; one of `tests.torture.vocabularies.SORTS`.
        seed: of the weights.
    """
    from flodl_hf.checkpoints.config.model_config import ModelConfig
    from flodl_hf.families import families
    from flodl_hf.heads.auto import head_named

    rows = next(known for known in families() if known.model_type == family).rows
    sizes = {**_SIZES, "num_layers": layers, "vocab_size": len(vocabulary_of(sort))}
    settings: dict[str, Any] = {row.key: sizes[row.field] for row in rows if row.field in sizes}
    kind = head_named(head).model
    if any(row.key == "pad_token_id" for row in rows):
        settings["pad_token_id"] = 0 if sort == "wordpiece" else 1
    if head in ("sequence_classification", "token_classification"):
        settings["labels"] = list(LABELS)
    torch.manual_seed(seed)
    model = kind.from_config(ModelConfig.for_model(family, **settings))
    with torch.no_grad():
        for name, parameter in model.graph.named_parameters():
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.3)
    with tempfile.TemporaryDirectory() as place:
        folder = model.save_pretrained(Path(place) / "made")
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return {**files, **tokenizer_files(sort)}


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        place = folder / name
        if "/" in name:
            place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)


def parts_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header of a safetensors file as parsed, ``__metadata__`` included, and the bytes behind it."""
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def whole(header: Mapping[str, Any] | str | bytes, body: bytes) -> bytes:
    """Return a safetensors file of a header, as an object or as its very text, and the bytes behind it."""
    text = header if isinstance(header, (str, bytes)) else json.dumps(header, separators=(",", ":"))
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw + body


_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64, "I64": torch.int64}


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's number type for one of safetensors' names."""
    return _DTYPES[name]


def tensors_in(data: bytes) -> dict[str, Tensor]:
    """Return the tensors of a good safetensors file."""
    header, body = parts_of(data)
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        flat = torch.frombuffer(bytearray(body[start:end]), dtype=torch_dtype(entry["dtype"]))
        found[name] = flat.reshape(entry["shape"])
    return found


def encoded(tensors: Sequence[tuple[str, Tensor]], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a safetensors file of tensors in that order."""
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    body = b""
    for name, tensor in tensors:
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [len(body), len(body) + len(raw)]
        }  # fmt: skip
        body += raw
    text = json.dumps(header, separators=(",", ":"))
    return whole(text + " " * (-len(text) % 8), body)
