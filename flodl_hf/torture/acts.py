"""Everything that this library writes, as acts on an empty folder: how it is prepared, done, judged and gone on with.

Decides what counts as whole: the old or the new, and the new once the act has said that it is done. How the disk
misbehaves is decided in `powerloss` and `disks`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

from flodl import system
from flodl.files import write_atomically
from flodl_hf.torture.case import Case, Fault, Kind, dealt
from flodl_hf.torture.checkpoints import checkpoint, write_files
from flodl_hf.torture.crash import Tree, tree_of
from flodl_hf.torture.disk import Disk

__all__ = ["ACTS", "Act", "act_named", "dealt_in_order", "inert", "kinds_of_acts"]

Mark = Callable[[str], None]
HEAD = "sequence_classification"
ROWS = 40


@dataclass(frozen=True)
class Act:
    """Something that is written.

    Attributes:
        name: in words.
        prepare: makes what is there beforehand.
        do: writes, and marks what it has said to be done.
        judge: given a folder and what had been said, returns what is wrong in it, or None.
        go_on: does the same again in such a folder, as the user would; returns what is wrong, or None.
    """

    name: str
    prepare: Callable[[Path], None]
    do: Callable[[Path, Mark], Any]
    judge: Callable[[Path, frozenset[str]], str | None]
    go_on: Callable[[Path, frozenset[str]], str | None]


def inert(path: str) -> bool:
    """Return whether steps on a path come and go by themselves: what a rank of `predict_file` tells each second."""
    return re.search(r"rank-\d{5}\.json", path) is not None


# ---- what is written -------------------------------------------------------------------------------------


@cache
def _model(seed: int) -> Any:
    """Return a model; those of different seeds differ in every weight."""
    import tempfile

    from flodl_hf import load

    with tempfile.TemporaryDirectory() as place:
        write_files(Path(place) / "made", checkpoint("bert", HEAD, layers=1, seed=seed))
        return load(Path(place) / "made")


def _part(tree: Tree, name: str) -> Tree:
    """Return what is in one folder of a tree."""
    return {path: data for path, data in tree.items() if path == name or path.startswith(name + os.sep)}


@cache
def _written(act: str) -> tuple[Tree, Tree]:
    """Return what an act finds and what it leaves where nothing goes wrong."""
    import tempfile

    chosen = act_named(act)
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        chosen.prepare(root)
        before = tree_of(root)
        chosen.do(root, lambda mark: None)
        return before, tree_of(root)


def _old_or_new(act: str, names: tuple[str, ...], *, gap: bool = False) -> Callable[[Path, frozenset[str]], str | None]:
    """Return the judge of folders or files that are replaced as a whole.

    Args:
        act: its name.
        names: what is replaced.
        gap: names cannot be exchanged, so for a moment the old folder has another one.
    """

    def judge(root: Path, said: frozenset[str]) -> str | None:
        (before, after), now = _written(act), tree_of(root)
        for name in names:
            found, old, new = _part(now, name), _part(before, name), _part(after, name)
            if found == new or (found == old and "done" not in said):
                continue
            if gap and "done" not in said and not found and _aside(now, name) == _inner(old, name):
                continue
            if found == old:
                return f"{name}: still the old one, after the new one was said to be there"
            return f"{name}: neither the old nor the new; holds {sorted(found)[:6] or 'nothing'}"
        return None

    return judge


def _aside(tree: Tree, name: str) -> Tree:
    """Return what is in the old folder that was put aside between two renames."""
    kept = [path for path in tree if path.startswith(f".{name}.old-") and os.sep not in path]
    return _inner(_part(tree, kept[0]), kept[0]) if len(kept) == 1 else {}


def _inner(tree: Tree, name: str) -> Tree:
    return {path.removeprefix(name): data for path, data in tree.items()}


def _again(act: str, names: tuple[str, ...]) -> Callable[[Path, frozenset[str]], str | None]:
    """Return the going on with acts that are done again: the new is there, and nothing else is left."""

    def go_on(root: Path, said: frozenset[str]) -> str | None:
        act_named(act).do(root, lambda mark: None)
        after, now = _written(act)[1], tree_of(root)
        for name in names:
            if _part(now, name) != _part(after, name):
                return f"{name}: done again, and not what it should be"
        left = sorted(path for path in now if path not in after)
        return f"left behind: {left[:6]}" if left else None

    return go_on


def _nothing(root: Path) -> None:
    pass


def _done(work: Callable[[Path], Any]) -> Callable[[Path, Mark], None]:
    def do(root: Path, mark: Mark) -> None:
        work(root)
        mark("done")

    return do


def _folder_act(name: str, prepare: Callable[[Path], Any], work: Callable[[Path], Any], *, gap: bool = False) -> Act:
    return _whole_act(name, prepare, work, ("out",), gap=gap)


def _whole_act(
    name: str, prepare: Callable[[Path], Any], work: Callable[[Path], Any], names: tuple[str, ...], *, gap: bool = False
) -> Act:
    return Act(name, prepare, _done(work), _old_or_new(name, names, gap=gap), _again(name, names))


def _old_export(root: Path) -> None:
    _model(1).save_pretrained(root / "out", max_shard_size=4000, extra_files={"README.md": b"# the old one\n"})


def _export(root: Path) -> None:
    _model(0).save_pretrained(root / "out", overwrite=True)


def _without_exchange(root: Path) -> None:
    real = system.exchange
    system.exchange = lambda source, target: False
    try:
        _export(root)
    finally:
        system.exchange = real


def _pickled(root: Path) -> None:
    from safetensors.torch import load as parse

    files = checkpoint("bert", HEAD, layers=1)
    write_files(root / "in", {"config.json": files["config.json"]})
    torch.save(parse(files["model.safetensors"]), root / "in" / "pytorch_model.bin")


def _convert(root: Path) -> None:
    from flodl_hf.export import convert_bin

    convert_bin(root / "in", root / "out", overwrite=True)


def _unlisted(root: Path) -> None:
    _old_export(root)
    (root / "out" / "README.md").write_bytes(b"# another\n")


def _list_again(root: Path) -> None:
    from flodl_hf.weights.checksums import write_checksums

    write_checksums(root / "out")


def _graph(root: Path) -> None:
    # Its arithmetic is nobody's matter here: names and numbers are.
    _model(0).graph.save_checkpoint(root / "graph.fdl")


def _old_graph(root: Path) -> None:
    _model(1).graph.save_checkpoint(root / "graph.fdl")


def _one_file(root: Path) -> None:
    write_atomically(root / "report.json", (bytes([65 + i]) * 100 for i in range(4)))


@cache
def _adapted(seed: int) -> Any:
    """Return a model with an adapter; those of different seeds differ in every weight of it."""
    from flodl_hf.adapters import Lora

    model = _model(2 + seed)
    torch.manual_seed(seed)
    model.add_adapter(Lora(rank=2))
    with torch.no_grad():
        for parameter in model.graph.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.3)
    return model


def _old_adapter(root: Path) -> None:
    _adapted(1).save_adapter(root / "out")


def _adapter(root: Path) -> None:
    _adapted(0).save_adapter(root / "out", overwrite=True)


def _vectors(root: Path, seed: int) -> None:
    from flodl_hf.vectors.files import write_vectors

    write_vectors(root / "vectors.npy", torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)).numpy())


# ---- training --------------------------------------------------------------------------------------------


def _train(root: Path, mark: Mark) -> dict[str, torch.Tensor]:
    """Train a small model with checkpoints on the way; return its weights."""
    from flodl.train import Loss, Saved, Trainer, adamw

    def make(device: Any) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))

    def step(model: nn.Module, batch: Any) -> Loss:
        return Loss(model(batch["x"]).square().sum(), len(batch["x"]))

    generator = torch.Generator().manual_seed(3)
    rows = {"x": torch.randn(16, 4, generator=generator)}
    builder = Trainer.builder(make, adamw(1e-2), step).dataset(rows).batch_size(4).num_epochs(2)
    builder.checkpoints(str(root / "runs" / "one"), every=3, resume=True, keep_last=1, keep_best="size")
    builder.eval_fn(lambda model: {"size": float(sum(p.abs().sum() for p in model.parameters()))})
    builder.set(seed=7, eval_every=4)
    builder.subscribe(lambda event: mark(f"step {event.step}"), Saved)
    trained = builder.run().join()
    mark("done")
    return {name: tensor.clone() for name, tensor in trained.state_dict().items()}


@cache
def _trained() -> Mapping[str, torch.Tensor]:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        return _train(Path(place), lambda mark: None)


def _judge_checkpoints(root: Path, said: frozenset[str]) -> str | None:
    from flodl.errors import CheckpointError
    from flodl.train.saving.reading import list_checkpoints, read_checkpoint

    there = list_checkpoints(root / "runs" / "one")
    newest = -1
    for path in there:
        try:
            newest = max(newest, read_checkpoint(path).step)
        except CheckpointError as error:
            return f"a checkpoint that is not whole has a name: {error.message}"
    saved = max((int(word.split()[1]) for word in said if word.startswith("step ")), default=-1)
    return f"step {saved} was said to be saved, and step {newest} is the newest" if newest < saved else None


def _go_on_training(root: Path, said: frozenset[str]) -> str | None:
    found = _train(root, lambda mark: None)
    expected = _trained()
    if any(not torch.equal(found[name], expected[name]) for name in expected):
        return "gone on with, and other weights than those of a run left alone"
    left = sorted(path.name for path in (root / "runs" / "one").glob(".[sg]*"))
    return f"left behind: {left}" if left else None


# ---- files of answers ------------------------------------------------------------------------------------


def _texts(root: Path) -> None:
    words = "the a cat dog sat on mat good bad film is was not very paris".split()  # noqa: SIM905 - read as words
    rows = [{"id": i, "text": " ".join(words[(i * 7 + k) % len(words)] for k in range(i % 9 + 1))} for i in range(ROWS)]
    source = root / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _as_it_was(root)


def _as_it_was(root: Path) -> None:
    """Give the input the time of its last change, which a run knows it by."""
    os.utime(root / "in.jsonl", ns=(10**18, 10**18))


def _texts_and_answers(root: Path) -> None:
    _texts(root)
    (root / "out.csv").write_text("id,label\n0,old\n")


def _answer(root: Path, mark: Mark, suffix: str, *, restart: bool) -> Any:
    from flodl_hf import predict_file
    from flodl_hf.bulk.parts import Parts

    commit = Parts.commit

    def told(self: Parts, number: int, *given: Any) -> None:
        commit(self, number, *given)
        mark(f"part {number}")

    Parts.commit = told  # type: ignore[method-assign]
    try:
        result = predict_file(_model(0), root / "in.jsonl", root / f"out.{suffix}", part_rows=15, restart=restart)
    finally:
        Parts.commit = commit  # type: ignore[method-assign]
    mark("done")
    return result


def _judge_answers(act: str, suffix: str) -> Callable[[Path, frozenset[str]], str | None]:
    whole = _old_or_new(act, (f"out.{suffix}",))

    def judge(root: Path, said: frozenset[str]) -> str | None:
        from flodl_hf.bulk.parts import Parts
        from flodl_hf.errors import PredictError

        fault = whole(root, said)
        if fault is not None or "done" in said:
            return fault
        parts = Parts(root / f"out.{suffix}", suffix)
        if not parts.folder.exists():
            written = tree_of(root).get(f"out.{suffix}") == _written(act)[1][f"out.{suffix}"]
            return None if written or not any(word.startswith("part") for word in said) else "finished parts are gone"
        try:
            parts.known()
        except PredictError as error:
            return f"a power loss is no other run: {error.message}"
        for number in range(3):
            there = parts.is_whole(number)
            if not there and f"part {number}" in said:
                return f"part {number} was finished, and is not there"
            if not there and parts.record(number) is not None:
                return f"part {number} has a record and other bytes"
        return None

    return judge


def _go_on_answering(act: str, suffix: str) -> Callable[[Path, frozenset[str]], str | None]:
    def go_on(root: Path, said: frozenset[str]) -> str | None:
        from flodl_hf.errors import PredictError

        target, expected = root / f"out.{suffix}", _written(act)[1][f"out.{suffix}"]
        whole = target.exists() and target.read_bytes() == expected
        begun = (target.with_name(target.name + ".parts") / "manifest.json").exists()
        _as_it_was(root)
        try:
            # What was begun goes on as it was begun; where nothing is left of it, the same command is said again.
            result = _answer(root, lambda mark: None, suffix, restart="restart" in act and not begun)
        except PredictError as error:
            if whole and not begun and "exists already" in error.message:
                return None
            return f"cannot be gone on with: {error.message}"
        finished = sum(word.startswith("part ") for word in said)
        if target.read_bytes() != expected:
            return "gone on with, and other answers"
        if begun and result.resumed < min(finished, 3):
            return f"{finished} parts were finished, {result.resumed} were gone on from"
        left = sorted(p.name for p in root.iterdir() if p.name not in ("in.jsonl", target.name))
        return f"left behind: {left}" if left else None

    return go_on


def _answers_act(name: str, suffix: str, *, restart: bool) -> Act:
    return Act(
        name,
        _texts_and_answers if restart else _texts,
        lambda root, mark: _answer(root, mark, suffix, restart=restart),
        _judge_answers(name, suffix),
        _go_on_answering(name, suffix),
    )


ACTS: tuple[Act, ...] = (
    _folder_act("an export", _nothing, _export),
    _folder_act("an export over an old one", _old_export, _export),
    _folder_act("an export where names cannot be exchanged", _old_export, _without_exchange, gap=True),
    _whole_act("an export into folders to be made", _nothing, lambda root: _model(0).save_pretrained(
        root / "a" / "b", overwrite=True), (f"a{os.sep}b",)),
    _folder_act("a conversion", _pickled, _convert),
    _folder_act("an adapter over an old one", _old_adapter, _adapter),
    _whole_act("a file of vectors", lambda root: _vectors(root, 1), lambda root: _vectors(root, 0), ("vectors.npy",)),
    _whole_act("checksums", _unlisted, _list_again, (f"out{os.sep}checksums.json",)),
    _whole_act("a tokenizer", _nothing, lambda root: _model(0).tokenizer.save_pretrained(root),
               ("tokenizer.json", "tokenizer_config.json", "vocab.txt")),
    _whole_act("a graph's file", _old_graph, _graph, ("graph.fdl",)),
    _whole_act("one file", lambda root: write_atomically(root / "report.json", [b"old"]), _one_file, ("report.json",)),
    Act("checkpoints", _nothing, _train, _judge_checkpoints, _go_on_training),
    _answers_act("a file of answers", "jsonl", restart=False),
    _answers_act("a file of answers, restart", "csv", restart=True),
)  # fmt: skip


def act_named(name: str) -> Act:
    """Return the act of that name."""
    return next(act for act in ACTS if act.name == name)


def recorded(act: Act, root: Path, disk: Disk) -> None:
    """Do an act on a watched disk."""
    with disk.watched():
        act.do(root, disk.mark)


def kinds_of_acts(shares: Mapping[str, int], key: str) -> tuple[Kind, ...]:
    """Return a kind of fault for each act, whose number stands under ``key``; acts without a share have one of 1."""

    def kind(name: str) -> Kind:
        def fault(random: Random, number: int) -> Fault:
            return Fault({"act": name, key: number})

        return Kind(name, shares.get(name, 1), fault, {"cpu_s": 60.0, "wall_s": 300.0, "memory_mb": 600})

    return tuple(kind(act.name) for act in ACTS)


def dealt_in_order(suite: str, kinds: Sequence[Kind], seed: int, count: int) -> Iterator[Case]:
    """Yield cases of each act in turn, each with the seed that decides in which order its numbers are taken."""
    for case in dealt(suite, kinds, seed, count):
        yield replace(case, fault=Fault({**case.what, "order": seed}))
