"""Methods that accept keywords of other libraries, by tables.

The decorator `taking` receives the table; keywords of the method have precedence. A keyword of another library is
mapped to ours (``aggregation_strategy`` to ``aggregation``), ignored if its value does not change the answer
(``padding``), or refused with the reason. No keyword is accepted with another meaning.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from flodl.errors import FlodlError, nearest
from flodl_hf.errors import PredictError

F = TypeVar("F", bound=Callable[..., Any])
LONG_TEXTS = {"windows": "windows", "truncate": "truncate", "error": "strict"}
"""Values of ``long_texts``, and the keyword of a method that each value sets unless it is the default."""


class KeywordAlias(NamedTuple):
    """A keyword of another library.

    Args:
        ours: our keyword; None where there is none.
        value: converts its value, given the model.
        reason: why it is refused if ``ours`` is None.
        harmless: values that have no effect and are ignored; None for any value.
    """

    ours: str | None = None
    value: Callable[[Any, Any], Any] = lambda value, model: value
    reason: str = ""
    harmless: tuple[Any, ...] | None = (None, False)


def accept_keywords(
    words: Mapping[str, KeywordAlias], fault: type[FlodlError] = PredictError, *, like: Callable[..., Any] | None = None
) -> Callable[[F], F]:
    """Return a decorator for methods that accept keywords of other libraries.

    Args:
        words: the table.
        fault: the error for refused keywords.
        like: the method that receives other keywords; its signature is added to this one's.
    """

    def decorate(method: F) -> F:
        signature = inspect.signature(method)
        if like is not None:
            signature = _joined(signature, inspect.signature(like))
        own = _own(signature)

        @wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            if not own.issuperset(options):
                options = _translated(method.__name__, args[0] if args else None, options, own, words, fault)
            return method(*args, **options)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate


def _own(signature: inspect.Signature) -> frozenset[str]:
    """Return the own keywords of a method."""
    names = {p.name for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values()):
        # The names of `flodl_hf.inference.RunKeywords`, which is imported with the first prediction.
        names |= {"precision", "token_budget", "devices", "batch_invariant", "window", "progress"}
    return frozenset(names)


def _joined(own: inspect.Signature, other: inspect.Signature) -> inspect.Signature:
    """Return a signature with the keywords of another added."""
    mine = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    more = [p for p in other.parameters.values() if p.kind in kinds]
    there = {p.name for p in mine}
    return own.replace(parameters=[*mine, *(p for p in more if p.name not in there)])


def _translated(
    method: str, owner: Any, options: dict[str, Any], own: frozenset[str], words: Mapping[str, KeywordAlias],
    fault: type[FlodlError],
) -> dict[str, Any]:  # fmt: skip
    if "long_texts" in words:
        options = replace_long_texts(method, options, own)
    found = {name: value for name, value in options.items() if name in own}
    refused: list[str] = []
    for name, value in options.items():
        if name in own:
            continue
        word = words.get(name)
        if word is None:
            known = sorted(own - {"self", "cls"})
            raise TypeError(
                f"{method}: unexpected keyword argument {name!r}{nearest(name, [*known, *words])}; expected one of "
                f"{', '.join(known)}"
            )
        if word.ours is None:
            if word.harmless is not None and not any(
                type(value) is type(one) and value == one for one in word.harmless
            ):
                refused.append(f"{name}={value!r}: {word.reason}")
            continue
        try:
            ours = word.value(value, owner)
        except ValueError as why:
            refused.append(f"{name}={value!r}: {why}")
            continue
        if word.ours in found and found[word.ours] is not ours and found[word.ours] != ours:
            refused.append(f"{name}={value!r} and {word.ours}={found[word.ours]!r} have different values")
            continue
        found[word.ours] = ours
    if refused:
        raise fault(f"{method}: {'; '.join(refused)}", problems=refused)
    return found


def replace_long_texts(method: str, options: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """Return keywords with ``long_texts`` replaced by the keyword of the method.

    Args:
        method: the method's name, for errors.
        options: the keywords of a call.
        own: the keywords of the method. One with ``windows`` truncates by default; others read windows.

    Raises:
        PredictError: the method does not support the value, or an alias of ``long_texts`` is also given.
    """
    rest = dict(options)
    value = rest.pop("long_texts", None)
    if value is None:
        return rest
    default = "truncate" if "windows" in own else "windows"
    supported = [name for name, word in LONG_TEXTS.items() if name == default or word in own]
    if value not in supported:
        raise PredictError(
            f"{method}: found long_texts={value!r}, expected {' or '.join(map(repr, supported))}", long_texts=value
        )
    others = (*LONG_TEXTS.values(), "truncation", *(["max_length"] if value == "windows" else []))
    if both := [name for name in others if rest.get(name) is not None]:
        raise PredictError(
            f"{method}: found long_texts={value!r} and {', '.join(f'{name}=' for name in both)}, expected one of them. "
            "Pass only long_texts=.",
            problems=["long_texts", *both],
        )
    return rest if value == default else {**rest, LONG_TEXTS[value]: True}
