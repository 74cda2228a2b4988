"""Suite ``interrupts``: Ctrl-C at any line of a call, and the next call is right.

The lines that a call comes to are counted once; each case sends SIGINT at one of them. Right is: the caller gets the
interrupt (or the whole answer), what the process shares is as it was (garbage collection, gradients, hooks), and the
same call gives the same bits as before. A folder that was being written is the old or the new one.
"""

from __future__ import annotations

import gc
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from tests.torture import library
from tests.torture.case import Case, Fault, Grade, Kind, Verdict, dealt, right, silent
from tests.torture.checkpoints import TEXTS, checkpoint, write_files
from tests.torture.comparing import IDS
from tests.torture.ctrl_c import CtrlC
from tests.torture.judging import judge

__all__ = ["NAME", "cases", "run", "together"]

NAME = "interrupts"
_GOLDEN = 0.6180339887498949
HEADS = {"sequence_classification": "bert", "token_classification": "roberta", "question_answering": "distilbert",
         "masked_lm": "bert", "base": "deberta-v2"}  # fmt: skip
SORTS = {"roberta": "bytes"}


# --- what is done -----------------------------------------------------------------------------------------------------


@dataclass
class Act:
    """A call, ready to be made again and again.

    Attributes:
        call: what is interrupted.
        value: from what the call returned to what is compared.
        modules: the network, or None: whether hooks stay on it is looked at.
        before: done before every call, outside of what is interrupted.
        after: what an interrupted call left on the disk: a fault, or None.
        lines: how many lines of Python the call comes to.
        expected: its value, undisturbed.
    """

    call: Callable[[], Any]
    value: Callable[[Any], list[Tensor]]
    modules: nn.Module | None = None
    before: Callable[[], None] = lambda: None
    after: Callable[[], str | None] = lambda: None
    lines: int = 0
    expected: list[Tensor] | None = None


def _loaded(place: Path, head: str, *, layers: int = 2) -> Any:
    family = HEADS[head]
    folder = place / f"{family}-{head}"
    if not folder.exists():
        write_files(folder, checkpoint(family, head, layers, SORTS.get(family, "wordpiece")))
    return library.load(folder, head)


def _network(model: Any) -> nn.Module:
    return model.graph if hasattr(model, "graph") else model.model


def _predicts(head: str, place: Path) -> Act:
    model = _loaded(place, head)
    call = partial(_asked, model, head)
    return Act(call, lambda found: [torch.as_tensor(_numbers(found))], _network(model))


def _asked(model: Any, head: str) -> Any:
    if head == "question_answering":
        return model.answer_batch([("who sat?", text) for text in TEXTS])
    if head == "masked_lm":
        return model.fill_mask([f"{text} [MASK]" for text in TEXTS], top_k=2)
    return model.embed(TEXTS) if head == "base" else model.predict(TEXTS)


def _numbers(found: Any) -> list[float]:
    if isinstance(found, Tensor):
        return found.reshape(-1).tolist()
    if isinstance(found, (float, int)):
        return [float(found)]
    if isinstance(found, (list, tuple)):
        return [number for part in found for number in _numbers(part)]
    kept = ("score", "start", "end")
    return [float(getattr(found, name)) for name in kept if getattr(found, name, None) is not None]


def _looks_inside(place: Path) -> Act:
    model = _loaded(place, "sequence_classification")
    model.set_attention("eager")

    def call() -> Any:
        with torch.no_grad():
            return model(input_ids=IDS, output_hidden_states=True, output_attentions=True)

    return Act(call, lambda out: [out[0], *out.hidden_states, *out.attentions], _network(model))


def _given_embeddings(place: Path) -> Act:
    model = _loaded(place, "sequence_classification")
    width = 8
    embeds = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(0))

    def call() -> Any:
        with torch.no_grad():
            return model(inputs_embeds=embeds)[0], model(input_ids=IDS)[0]

    return Act(call, list, _network(model))


def _loads(place: Path) -> Act:
    _loaded(place, "sequence_classification")
    folder = place / "bert-sequence_classification"
    call = partial(library.load, folder, "sequence_classification")
    return Act(call, lambda model: [library.scores(model, IDS), *library.tensors(model).values()])


def _saves(place: Path) -> Act:
    head = "sequence_classification"
    root = place / "saved"
    old, new, target = root / "old", root / "new", root / "target"
    shutil.rmtree(root, ignore_errors=True)
    write_files(old, checkpoint("bert", head, 2))
    write_files(new, checkpoint("bert", head, 1, seed=1))
    model = library.load(new, head)

    def state() -> list[Tensor]:
        found = library.load(target, head)
        return [library.scores(found, IDS), *library.tensors(found).values()]

    def put_back() -> None:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(old, target)

    put_back()
    legal = [state()]
    library.save(model, target)
    legal.append(state())

    def after() -> str | None:
        try:
            found = state()
        except Exception as fault:
            return f"the folder cannot be loaded: {fault}"
        return None if any(_same(found, known) for known in legal) else "the folder is neither the old nor the new one"

    def value(_: Any) -> list[Tensor]:
        left = sorted(path.name for path in root.iterdir())
        return [*state(), torch.tensor(len(left))]

    return Act(lambda: library.save(model, target), value, _network(model), put_back, after)


ACTS: Mapping[str, Callable[[Path], Act]] = {
    **{f"predict-{head}": partial(_predicts, head) for head in HEADS},
    "inside": _looks_inside,
    "embeddings": _given_embeddings,
    "load": _loads,
    "save": _saves,
}
SHARES = {"load": 2, "save": 2, "inside": 2}


def _kind(name: str) -> Kind:
    def fault(random: Random, number: int) -> Fault:
        # Evenly over the lines of the call, whatever the number of cases; the seed shifts them.
        return Fault({"act": name, "place": (number * _GOLDEN + random.random() * 1e-4) % 1.0})

    return Kind(name, SHARES.get(name, 1), fault, {"cpu_s": 30.0, "wall_s": 120.0, "memory_mb": 400})


KINDS = tuple(_kind(name) for name in ACTS)

cases = partial(dealt, NAME, KINDS)


def together(case: Case) -> str:
    """Return what cases share that are best run by one process: the call, done undisturbed."""
    return case.kind


# --- judging ----------------------------------------------------------------------------------------------------------

_ready: dict[str, Act] = {}


def _act(name: str, root: Path) -> Act:
    """Return an act that was done twice without a disturbance; made once in a process."""
    if name not in _ready:
        act = ACTS[name](root / "acts")
        act.before()
        act.value(act.call())
        act.before()
        with CtrlC() as counted:
            found = act.call()
        act.expected, act.lines = act.value(found), counted.lines
        _ready[name] = act
    return _ready[name]


def run(case: Case, folder: Path) -> Verdict:
    """Interrupt a call at one line, look at what it left, and make it again."""
    what = case.what
    act = _act(what["act"], folder.parent)
    verdict = judge(
        case, lambda: _interrupted(act, 1 + int(what["place"] * act.lines)), lambda found: found,
        writes=(folder.parent / "acts",),
    )  # fmt: skip
    if not verdict.good:
        _ready.pop(what["act"], None)
        gc.enable()
        torch.set_grad_enabled(True)
    return verdict


def _interrupted(act: Act, at: int) -> Verdict:
    act.before()
    shared = _shared(act)
    result: Any = None
    finished = False
    with CtrlC(at) as sent:
        try:
            result = act.call()
            finished = True
        except KeyboardInterrupt:
            pass
    where = f"Ctrl-C at {sent.where or 'no line'}"
    if finished and not _same(act.value(result), act.expected):
        return silent(f"{where}: went on, to another result")
    del result
    gc.collect(0)
    changed = [name for name, value in _shared(act).items() if value != shared[name]]
    if changed:
        return Verdict(Grade.PARTIAL, f"{where}: {', '.join(changed)} not as before")
    fault = act.after()
    if fault is not None:
        return Verdict(Grade.PARTIAL, f"{where}: {fault}")
    try:
        again = act.value(act.call())
    except Exception as error:
        return Verdict(Grade.PARTIAL, f"{where}: the next call fails: {error}", type(error).__name__)
    if not _same(again, act.expected):
        return silent(f"{where}: the next call has another result")
    return right()


def _shared(act: Act) -> dict[str, Any]:
    """Return what a call shares with all others of its process."""
    modules = list(act.modules.modules()) if act.modules is not None else []
    return {
        "garbage collection": (gc.isenabled(), gc.get_freeze_count()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "number type": torch.get_default_dtype(),
        "torch's threads": torch.get_num_threads(),
        "training": [module.training for module in modules],
        "this thread's name": threading.current_thread().name,
        "where weights lie": [(p.device, p.dtype, p.requires_grad) for m in modules for p in m.parameters(False)],
    }


def _same(found: list[Tensor] | None, expected: list[Tensor] | None) -> bool:
    assert found is not None
    assert expected is not None
    return len(found) == len(expected) and all(a.shape == b.shape and torch.equal(a, b)
                                               for a, b in zip(found, expected, strict=True))  # fmt: skip
