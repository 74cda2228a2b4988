"""Suite ``texts``: strange texts and what is no text at all, alone, together, and from eight threads at once.

Right is what the tokenizers library gives for ids, what a call of the model gives for those ids, and what a text gets
alone where it is one of many. Threads answer while others look inside, change the precision and write weights; each
has to get what it gets alone, and after a change of the weights the next answer is that of the new ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from tests.torture import library
from tests.torture.case import Case, Fault, Kind, Verdict, dealt, right, silent
from tests.torture.checkpoints import TEXTS, checkpoint, write_files
from tests.torture.comparing import IDS
from tests.torture.judging import judge
from tests.torture.vocabularies import SORTS, WORDS

__all__ = ["NAME", "cases", "run"]

NAME = "texts"
HEAD = "sequence_classification"
_NAMES = tuple(SORTS)
LONG = 32
PIECES = (
    "", " ", "\t", "\r\n", "\u00a0", "\u200b", "\u200d", "\ufeff", "\x00", "\x07", "\x1b[2J", "\x85", "\u2028",
    "[MASK]", "[CLS]", "[SEP]", "[PAD]", "<s>", "</s>", "<mask>", "<pad>", "##a", "\u2581", "\u0120",
    "\u00e9", "e\u0301", "\u0301" * 300, "\u05e9\u05dc\u05d5\u05dd", "\u202eabc", "\u6771\u4eac", "\u0928\u092e",
    "\U0001f600", "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\ufb01", "\u0130", "\u00df", "\uff21", "\U0010ffff",
    "\uffff",
    "a" * 101, "a" * 20_000, "the " * 5_000, " " * 20_000, ".,!?'" * 400, "\ud800", "\udfff", *WORDS, *"aby.,!",
)  # fmt: skip
NO_TEXTS: Mapping[str, Callable[[], Any]] = {
    "None": lambda: None, "a number": lambda: 3, "a fraction": lambda: 1.5, "not a number": lambda: float("nan"),
    "true": lambda: True, "bytes": lambda: b"the cat", "an object": object, "a mapping": lambda: {"a": 1},
    "none in a list": lambda: ["the cat", None], "bytes in a list": lambda: ["the cat", b"x"],
    "a list in a list": lambda: [["the cat", ["sat"]]], "numbers": lambda: [1, 2], "a type": lambda: str,
    "a tensor": lambda: torch.zeros(2), "three texts in one": lambda: [("a", "b", "c")],
    "an iterator that fails": lambda: (1 // 0 for _ in [1]),
}  # fmt: skip


@cache
def files(sort: str, head: str = HEAD) -> Mapping[str, bytes]:
    """Return a model with a tokenizer of a sort."""
    return checkpoint(SORTS[sort], head, 1, sort)


def _drawn(random: Random) -> str:
    pieces = [random.choice(PIECES) for _ in range(random.choice((1, 1, 2, 3, 6)))]
    return random.choice(("", " ")).join(pieces)


def _alone(random: Random, number: int) -> Fault:
    text = PIECES[number // 3] if number // 3 < len(PIECES) else _drawn(random)
    return Fault({"sort": _NAMES[number % 3], "texts": [text]})


def _together(random: Random, number: int) -> Fault:
    sound = [piece for piece in PIECES if not any("\ud800" <= c <= "\udfff" for c in piece)]
    texts = ["".join(random.choice(sound) for _ in range(random.choice((1, 2, 3)))) for _ in range(12)]
    return Fault({"sort": _NAMES[number % 3], "texts": texts})


def _no_text(_random: Random, number: int) -> Fault:
    return Fault({"sort": _NAMES[number % 3], "no text": list(NO_TEXTS)[number // 3 % len(NO_TEXTS)]})


def _threads(random: Random, number: int) -> Fault:
    return Fault({"sort": _NAMES[number % 3], "threads": random.randrange(2**32)})


KINDS = (
    Kind("alone", 20, _alone),
    Kind("together", 6, _together, {"cpu_s": 20.0}),
    Kind("no text", 4, _no_text),
    Kind("threads", 4, _threads, {"cpu_s": 30.0, "wall_s": 180.0, "memory_mb": 400}),
)

cases = partial(dealt, NAME, KINDS)


def prepare() -> None:
    """Make the checkpoints before workers are forked."""
    for sort in _NAMES:
        files(sort)


# --- judging ----------------------------------------------------------------------------------------------------------

_models: dict[tuple[str, str], Any] = {}


def _model(sort: str, root: Path, head: str = HEAD) -> Any:
    key = (sort, head)
    if key not in _models:
        folder = root / f"texts-{sort}-{head}"
        if not folder.exists():
            write_files(folder, files(sort, head))
        _models[key] = library.load(folder, head)
        library.answers(_models[key], TEXTS)
    return _models[key]


def run(case: Case, folder: Path) -> Verdict:
    """Give a model what the case drew."""
    what = case.what
    model = _model(what["sort"], folder.parent)
    if "threads" in what:
        encoder = _model(what["sort"], folder.parent, "base")
        ways = _ways(model, encoder)
        call = partial(_from_threads, model, ways, Random(what["threads"]))
        verdict = judge(case, call, lambda found: found)
        del _models[what["sort"], HEAD]  # its weights are others now
        return verdict
    if "no text" in what:
        given = NO_TEXTS[what["no text"]]()

        fails = what["no text"] == "an iterator that fails"

        def asked() -> Any:
            if not fails:
                return model.predict(given)
            try:
                return list(model.predict(given))
            except ZeroDivisionError:
                return None  # the caller's own error, which is the caller's to see

        return judge(
            case, asked,
            lambda found: right() if fails and found is None else silent(f"answered: {str(found)[:100]}"),
        )  # fmt: skip

    def act() -> tuple[list[list[int]], list[Tensor], Any]:
        texts = what["texts"]
        more = model.predict(texts)
        return library.ids(model, texts), [library.answers(model, [text]) for text in texts], more

    return judge(case, act, lambda found: _right(model, what, *found))


def _right(model: Any, what: Mapping[str, Any], ids: Sequence[list[int]], scores: list[Tensor], found: Any) -> Verdict:
    from tests.torture.own_ids import library_ids

    definition = files(what["sort"])["tokenizer.json"].decode()
    if list(map(list, ids)) != [list(row) for row in library_ids(definition, what["texts"])]:
        return silent("other ids than those of the tokenizers library")
    for row, mine in zip(ids, scores, strict=True):
        if len(row) <= LONG and not torch.allclose(
            library.scores(model, torch.tensor([row])).reshape(-1), mine, atol=1e-6
        ):
            return silent("other scores than those of the ids")
    answers: list[Any] = found if found is not None else []
    for answer, mine, row, text in zip(answers, scores, ids, what["texts"], strict=False):
        expected = mine.softmax(-1)
        told = {one.label: one.score for one in answer}
        if not told and not text.strip():
            continue  # of nothing nothing is said
        if len(row) <= LONG and abs(max(told.values(), default=0.0) - float(expected.max())) > 1e-5:
            return silent("predict gives other scores than a call of the model")
    return right()


# --- eight threads ----------------------------------------------------------------------------------------------------


Way = Callable[[], list[Tensor]]


def _from_threads(model: Any, ways: Mapping[str, Way], random: Random) -> Verdict:
    network = model.graph
    alone = {name: ways[name]() for name in ways}
    plans = [[random.choice(list(ways)) for _ in range(6)] for _ in range(8)]
    kept = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    faults: list[str] = []
    gate = threading.Barrier(8)

    def work(number: int) -> None:
        try:
            gate.wait(60)
            for name in plans[number]:
                if number == 0:  # writes what is there: what was prepared from the weights has to be made again
                    with torch.no_grad():
                        for parameter in network.parameters():
                            parameter.copy_(parameter.clone())
                found = ways[name]()
                if not all(map(partial(torch.allclose, rtol=0.0, atol=1e-6), found, alone[name])):
                    faults.append(f"{name} has another result beside others")
        except Exception as fault:
            faults.append(f"{type(fault).__name__}: {fault}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if any(not torch.equal(tensor, kept[name]) for name, tensor in network.state_dict().items()):
        faults.append("weights changed")
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.mul_(1.5 if "norm" not in name.lower() else 1.0)
    new = ways["answers"]()
    again = library.answers(model, TEXTS)
    if torch.allclose(new[0], alone["answers"][0]) or not torch.allclose(new[0], again, atol=1e-6):
        faults.append("the answer after a change of the weights is not that of the new ones")
    return silent("; ".join(faults[:3])) if faults else right()


def _ways(model: Any, encoder: Any) -> dict[str, Way]:
    """Return the calls that threads make, by name; each gives tensors."""

    def inside() -> list[Tensor]:
        with torch.no_grad():
            return list(model(input_ids=IDS, output_hidden_states=True).hidden_states)

    ways: dict[str, Way] = {
        "answers": lambda: [library.answers(model, TEXTS)],
        "scores": lambda: [library.scores(model, IDS)],
        "states": inside,
        "vectors": lambda: [library.answers(encoder, TEXTS)],
    }
    for precision in ("fp32", "exact"):
        ways[f"predict in {precision}"] = partial(_predicted, model, precision)
    ways["embed"] = lambda: [encoder.embed(list(TEXTS))]
    return ways


def _predicted(model: Any, precision: str) -> list[Tensor]:
    found = model.predict(list(TEXTS), precision=precision)
    return [torch.tensor([[one.score for one in sorted(row, key=lambda one: one.label)] for row in found])]
