"""The data of the benchmarks: what it is, where it belongs, and how it gets there.

    python -m benchmarks.ddp.fetch --data DIR

Files that are there are held to their checksums; others are fetched where there is a network. Without one the command
says which file to put where, and the benchmarks run on made-up data.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import sys
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from flodl.files import write_atomically

__all__ = ["CIFAR", "FILES", "MNIST", "SHAKESPEARE", "Source", "fetch", "missing"]


@dataclass(frozen=True)
class Source:
    """One file of the world.

    Attributes:
        url: where it is published.
        place: where it belongs, below the folder of the data.
        size: bytes.
        sha256: of those bytes.
        members: for an archive the files that are taken out of it, which belong at ``place`` instead of it.
    """

    url: str
    place: str
    size: int
    sha256: str
    members: tuple[str, ...] = ()

    def wanted(self, folder: Path) -> list[Path]:
        """Return the files that have to be there."""
        place = folder / self.place
        return [place / name for name in self.members] if self.members else [place]


_MNIST = "https://storage.googleapis.com/cvdf-datasets/mnist/"
MNIST = tuple(
    Source(_MNIST + name, f"mnist/{name}", size, digest)
    for name, size, digest in (
        (
            "train-images-idx3-ubyte.gz",
            9_912_422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        ("train-labels-idx1-ubyte.gz", 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        ("t10k-images-idx3-ubyte.gz", 1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        ("t10k-labels-idx1-ubyte.gz", 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    )
)
CIFAR = Source(
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    "cifar-10-batches-bin",
    170_052_171,
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"),
)
SHAKESPEARE = Source(
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "shakespeare/input.txt",
    1_115_394,
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
FILES = (*MNIST, CIFAR, SHAKESPEARE)
_RECORDS = 10_000 * 3073
"""Bytes of a part of CIFAR-10: ten thousand records of a label and 32 x 32 pixels in three colours."""


def missing(folder: Path, sources: Iterable[Source]) -> str:
    """Return which files are not there and where they come from; empty when all are."""
    lines = []
    for source in sources:
        absent = [path for path in source.wanted(folder) if not path.is_file()]
        if absent:
            what = f"{len(absent)} files of the archive {source.url}" if source.members else source.url
            lines.append(f"  {absent[0].parent if source.members else absent[0]}: {what} (SHA-256 {source.sha256})")
    return "\n".join(lines)


def fetch(folder: Path, sources: Iterable[Source] = FILES, *, open_url: object = urlopen) -> list[str]:
    """Bring what is missing, check what is there, and return what went wrong, a line each.

    Args:
        folder: of the data.
        sources: what to bring.
        open_url: opens an address, as `urllib.request.urlopen` does.
    """
    problems: list[str] = []
    for source in sources:
        wanted = source.wanted(folder)
        if all(path.is_file() for path in wanted):
            fault = _kept(source, wanted)
            problems += [fault] if fault else []
            continue
        try:
            data = _read(source, open_url)
        except (OSError, URLError, ValueError) as fault:
            problems.append(f"{source.url}: {fault}")
            continue
        for path, part in _parts(source, data, folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, [part])
    return problems


def _kept(source: Source, paths: Sequence[Path]) -> str:
    if source.members:
        sizes = {path.name: path.stat().st_size for path in paths if path.stat().st_size != _RECORDS}
        return f"{paths[0].parent}: {sizes} bytes; expected {_RECORDS} of each" if sizes else ""
    found = hashlib.sha256(paths[0].read_bytes()).hexdigest()
    return "" if found == source.sha256 else f"{paths[0]}: SHA-256 {found}; expected {source.sha256}"


def _read(source: Source, open_url: object) -> bytes:
    with open_url(source.url, timeout=60) as answer:  # type: ignore[operator]
        data = answer.read(source.size + 1)
    found = hashlib.sha256(data).hexdigest()
    if len(data) != source.size or found != source.sha256:
        raise ValueError(f"{len(data):,} bytes with SHA-256 {found}; expected {source.size:,} with {source.sha256}")
    return data


def _parts(source: Source, data: bytes, folder: Path) -> Iterable[tuple[Path, bytes]]:
    """Yield what is written: the file, or members of an archive by their names, wherever it says they belong."""
    if not source.members:
        yield folder / source.place, data
        return
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        for member in archive:
            name = Path(member.name).name
            if name in source.members and member.isfile():
                file = archive.extractfile(member)
                assert file is not None
                yield folder / source.place / name, file.read()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ddp.fetch", description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the data")
    folder = parser.parse_args(argv).data
    problems = fetch(folder)
    left = missing(folder, FILES)
    if problems:
        print("What went wrong:\n" + "\n".join(f"  {problem}" for problem in problems))
    if left:
        print(f"Put these files there by hand; without them the benchmarks run on made-up data:\n{left}")
    if not problems and not left:
        print(f"{folder}: MNIST, CIFAR-10 and Shakespeare are whole")
    return 1 if problems or left else 0


if __name__ == "__main__":
    sys.exit(main())
