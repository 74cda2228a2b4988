"""What a folder says its files are: written with every export, compared before a load and by ``flodl-hf verify``."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flodl.errors import CheckpointError
from flodl_hf import finetune, load, predict_file
from flodl_hf.checkpoints.weights.checksums import CHECKSUMS, compare_folder, write_checksums
from flodl_hf.families import FAMILIES
from flodl_hf.parity.verifying import verify

Saved = Callable[..., Path]
HEAD = "sequence_classification"
GOLDEN = Path(__file__).parents[2] / "golden"


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(bytes(data))


def command(*arguments: Any) -> tuple[int, str, str]:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from flodl_hf.cli.app import app

    done = CliRunner().invoke(app, ["verify", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


def test_an_export_lists_all_its_files(saved: Saved) -> None:
    folder = saved("bert", HEAD)
    listed = json.loads((folder / CHECKSUMS).read_text())["files"]
    assert set(listed) == {path.name for path in folder.iterdir()} - {CHECKSUMS}
    for name, entry in listed.items():
        data = (folder / name).read_bytes()
        assert entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    copy = load(folder, verified=True).save_pretrained(folder.with_name("copy"))
    assert (copy / CHECKSUMS).read_bytes() == (folder / CHECKSUMS).read_bytes()


@pytest.mark.parametrize(
    "family", [family.model_type for family in FAMILIES if "sequence_classification" in family.heads]
)
def test_a_flipped_bit_of_any_file_is_noticed_by_name(family: str, saved: Saved) -> None:
    folder, chance = saved(family, HEAD), random.Random(family)
    files = sorted(path for path in folder.iterdir() if path.name != CHECKSUMS)
    for path in files:
        whole = path.read_bytes()
        flip(path, chance.randrange(8 * len(whole)))
        with pytest.raises(CheckpointError) as caught:
            load(folder, verified=True)
        found, wanted = (hashlib.sha256(data).hexdigest() for data in (path.read_bytes(), whole))
        assert caught.value.files == [path.name]
        assert f"{path.name}: changed, found {found}" in caught.value.message
        assert f"expected {wanted}" in caught.value.message
        assert "--write" in caught.value.message
        path.write_bytes(whole)
    load(folder, verified=True)


def test_every_fault_of_a_folder_at_once(saved: Saved) -> None:
    folder = saved("bert", HEAD)
    (folder / "tokenizer.json").unlink()
    flip(folder / "model.safetensors", 99)
    (folder / "config.json").write_bytes(b"")
    (folder / "added_tokens.json").write_text("{}")
    (folder / "notes.txt").write_text("read by no load")
    with pytest.raises(CheckpointError) as caught:
        load(folder, head=HEAD, verified=True)
    assert sorted(caught.value.files) == ["added_tokens.json", "config.json", "model.safetensors", "tokenizer.json"]
    states = {state.name: state.status for state in compare_folder(folder).faults}
    assert states == {"added_tokens.json": "not listed", "config.json": "changed", "model.safetensors": "changed",
                      "tokenizer.json": "missing"}  # fmt: skip


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def led_out(path: Path) -> None:
    path.rename(path.parent.with_name("elsewhere"))
    path.symlink_to(path.parent.with_name("elsewhere"))


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("way", [pipe, led_out, directory])
@pytest.mark.parametrize("name", [CHECKSUMS, "tokenizer.json"])
def test_no_way_around_the_door(name: str, way: Callable[[Path], None], saved: Saved) -> None:
    folder = saved("bert", HEAD)
    way(folder / name)
    with pytest.raises(CheckpointError, match=name):
        load(folder, verified=True)
    code, out, err = command(folder)
    assert (code, name in out + err) == (1, True)


@pytest.mark.parametrize(
    "damage",
    [b"", b"{}", b"[]", b"[" * 100_000, b'{"format": "flodl-checksums/9", "files": {}}',
     b'{"format": "flodl-checksums/1", "files": {"../x": {"bytes": 1, "sha256": "00"}}}'],
)  # fmt: skip
def test_a_damaged_receipt_is_no_receipt(damage: bytes, saved: Saved) -> None:
    from flodl.files import seal

    folder = saved("bert", HEAD)
    sealed = damage if not damage.startswith(b'{"format') else seal(json.loads(damage))
    for data in (damage, sealed):
        (folder / CHECKSUMS).write_bytes(data)
        with pytest.raises(CheckpointError, match=r"checksums.json: cannot be used.*SHA-256") as caught:
            load(folder, verified=True)
        assert caught.value.file == CHECKSUMS
        assert command(folder)[0] == 1
    assert load(folder).head == HEAD


def test_a_name_out_of_the_folder_is_the_first_fault(saved: Saved) -> None:
    from flodl.files import seal

    folder = saved("bert", HEAD)
    files = {"../x": {"bytes": "many", "sha256": "00"}}
    (folder / CHECKSUMS).write_bytes(seal({"format": "flodl-checksums/1", "files": files}))
    with pytest.raises(CheckpointError, match=r"the name '\.\./x' is"):
        load(folder, verified=True)


def test_every_bit_of_the_receipt(saved: Saved) -> None:
    folder = saved("bert", HEAD)
    path = folder / CHECKSUMS
    whole = path.read_bytes()
    values = json.loads(whole)
    for bit in range(0, 8 * len(whole), 5):
        flip(path, bit)
        try:
            same = json.loads(path.read_bytes()) == values
        except ValueError:
            same = False
        if same:
            assert compare_folder(folder).whole
        else:
            with pytest.raises(CheckpointError, match="cannot be used"):
                compare_folder(folder)
        path.write_bytes(whole)


def test_fingerprints_know_another_model(saved: Saved) -> None:
    folder = saved("bert", HEAD)
    [before] = verify(folder)
    assert before.fingerprint is not None
    assert load(folder, verified=before.fingerprint).head == HEAD
    assert command(folder, "--expect", before.fingerprint)[0] == 0
    flip(folder / "model.safetensors", 8 * ((folder / "model.safetensors").stat().st_size - 3))
    write_checksums(folder)  # as whoever may write here could
    assert load(folder, verified=True).head == HEAD
    with pytest.raises(CheckpointError, match=f"expected '{before.fingerprint}'"):
        load(folder, verified=before.fingerprint)
    code, out, _ = command(folder, "--expect", before.fingerprint)
    assert (code, before.fingerprint in out) == (1, True)


def test_papers_may_be_edited(saved: Saved) -> None:
    folder = load(saved("bert", HEAD)).save_pretrained(
        saved("bert").with_name("carded"), extra_files={"README.md": b"# card\n"}
    )
    (folder / "README.md").write_text("# my card\n")
    assert load(folder, verified=True).head == HEAD
    code, out, _ = command(folder)
    assert (code, "README.md: changed" in out) == (1, True)
    assert command(folder, "--write")[0] == 0
    assert command(folder)[0] == 0


def test_a_folder_that_is_written_to_while_it_is_loaded(saved: Saved, monkeypatch: Any) -> None:
    import flodl_hf.models.pretrained as pretrained

    folder, real, times = saved("bert", HEAD), pretrained.load_tokenizer, iter((1, 2))

    def meddling(*given: Any, **more: Any) -> Any:
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data)
        os.utime(folder / "model.safetensors", ns=(1, next(times)))
        return real(*given, **more)

    monkeypatch.setattr(pretrained, "load_tokenizer", meddling)
    assert load(folder).head == HEAD
    with pytest.raises(CheckpointError, match=r"changed while it was loaded: model.safetensors"):
        load(folder, verified=True)


def snapshot(folder: Path, cache: Path, *, left_out: tuple[str, ...] = ()) -> Path:
    """Lay a folder out as a snapshot of the Hub's cache; weights by SHA-256, small files as git names them."""
    repository = cache / "models--owner--name"
    place = repository / "snapshots" / ("a" * 40)
    place.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for path in folder.iterdir():
        data = path.read_bytes()
        git = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)
        blob = hashlib.sha256(data) if path.suffix == ".safetensors" else git
        if path.name not in left_out:
            (repository / "blobs" / blob.hexdigest()).write_bytes(data)
            (place / path.name).symlink_to(f"../../blobs/{blob.hexdigest()}")
    return place


@pytest.mark.parametrize("listed", [True, False])
def test_blobs_of_the_hubs_cache_are_what_their_names_say(listed: bool, saved: Saved, tmp_path: Path) -> None:
    folder = load(saved("bert", HEAD)).save_pretrained(tmp_path / "card", extra_files={"README.md": b"# card\n"})
    # The card is listed and not fetched.
    place = snapshot(folder, tmp_path, left_out=("README.md",) if listed else ("README.md", CHECKSUMS))
    [comparison] = verify(place)
    assert (comparison.whole, comparison.by) == (True, CHECKSUMS if listed else "the Hub's cache")
    assert load(place, verified=True).head == HEAD
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        blob = (place / name).resolve()
        whole = blob.read_bytes()
        flip(blob, 1001)
        with pytest.raises(CheckpointError, match=f"{name}: changed"):
            load(place, verified=True)
        blob.write_bytes(whole)
    (place / "tokenizer.json").unlink()
    if listed:
        with pytest.raises(CheckpointError, match=r"tokenizer.json: missing"):
            load(place, verified=True)
    (place / "vocab.txt").write_text("[PAD]\n")
    with pytest.raises(CheckpointError, match=r"vocab.txt: not listed"):
        load(place, verified=True)


def test_the_receipt_of_verify_export_where_there_is_no_other(saved: Saved) -> None:
    from flodl_hf.export.verify import verify_export

    folder = saved("bert", HEAD)
    checks = {check.name: check.status for check in verify_export(folder, model=load(folder)).checks}
    assert checks["files as they were written"] == "pass"
    (folder / CHECKSUMS).unlink()
    assert verify(folder)[0].to_dict()["by"] == "verification.json"
    assert [(state.name, state.status) for state in verify(folder)[0].faults] == [(CHECKSUMS, "missing")]
    verify_export(folder, model=load(folder))
    load(folder, verified=True)
    flip(folder / "model.safetensors", 5000)
    assert command(folder)[0] == 1
    with pytest.raises(CheckpointError, match=r"model.safetensors: changed.*as verification.json says|"
                                              r"as verification.json says.*\n.*model.safetensors: changed"):  # fmt: skip
        load(folder, verified=True)


def test_nothing_to_compare_with_is_status_3(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(GOLDEN / "bert-base", folder)
    with pytest.raises(CheckpointError, match="no expected checksums"):
        load(folder, verified=True)
    assert command(folder)[0] == 3
    code, out, _ = command(folder, "--json")
    assert (code, json.loads(out)["whole"]) == (3, None)
    assert command(tmp_path / "absent")[0] == 1
    assert command(folder, "--write", "--expect", "0")[0] == 2
    assert command(folder, "--write")[0] == 0
    code, out, _ = command(folder, "--json")
    assert (code, json.loads(out)["folders"][0]["by"]) == (0, CHECKSUMS)


ROWS = [{"text": "a good film", "label": "good"}, {"text": "a bad film", "label": "bad"}] * 8


def test_fine_tuned_models_and_their_checkpoints(saved: Saved, tmp_path: Path) -> None:
    out, kept = tmp_path / "out", tmp_path / "kept"
    given: dict[str, Any] = {"train": ROWS, "batch_size": 4, "epochs": 2, "checkpoints": str(kept)}
    finetune(str(saved("bert")), **given, out=str(out), keep_checkpoints=True, save_every=2)
    [comparison] = verify(out)
    names = {state.name for state in comparison.files}
    assert names >= {"model.safetensors", "README.md", "recipe.yaml", "training.json"}
    assert comparison.whole
    assert command(out)[0] == 0
    checkpoints = verify(kept)
    assert checkpoints
    assert all(each.whole for each in checkpoints)
    for path in sorted(Path(checkpoints[-1].folder).iterdir()):
        whole = path.read_bytes()
        # A bit of a digest where the file itself is what says what the others are.
        flip(path, 8 * whole.index(b'"sha256": "') + 8 * 13 if path.name == "manifest.json" else 8 * (len(whole) // 2))
        found = verify(kept)
        assert [each.whole for each in found] == [True] * (len(found) - 1) + [False]
        assert [state.name for state in found[-1].faults] == [path.name]
        code, said, _ = command(kept)
        assert (code, path.name in said) == (1, True)
        path.write_bytes(whole)
    assert command(kept)[0] == 0


def test_a_folder_of_finished_parts(saved: Saved, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("the cat sat\n" * 40)
    out, asked = tmp_path / "out.jsonl", iter([False, False, True])
    predict_file(str(saved("bert", HEAD)), tmp_path / "in.txt", out, part_rows=8, should_stop=lambda: next(asked))
    folder = out.with_name("out.jsonl.parts")
    assert command(folder)[0] == 0
    for name in ("manifest.json", "part-00000001.jsonl", "part-00000001.json"):
        whole = (folder / name).read_bytes()
        flip(folder / name, 8 * (whole.index(b": ") + 4))
        [comparison] = verify(folder)
        assert [state.name for state in comparison.faults] == [name.replace("1.json", "1.jsonl").replace("ll", "l")]
        (folder / name).write_bytes(whole)
    assert verify(folder)[0].whole


def test_verify_needs_no_transformers(saved: Saved, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert command(saved("bert", HEAD))[0] == 0
