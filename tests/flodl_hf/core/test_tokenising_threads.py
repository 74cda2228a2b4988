"""Texts are tokenised on several cores although another library or a parent switched that off."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from flodl_hf.errors import TokenizerError
from flodl_hf.tokenization import backend
from flodl_hf.tokenization.tokenizer import Tokenizer

TEXTS = [f"the cat sat on the mat {'very ' * (i % 23)}good" for i in range(700)]


def run_of(seen: set[str]) -> Callable[[list[str]], list[str]]:
    def run(batch: list[str]) -> list[str]:
        seen.add(threading.current_thread().name)
        return [text.upper() for text in batch]

    return run


@pytest.mark.parametrize(
    ("now", "most", "own_threads"),
    [("false", None, True), ("0", None, True), ("false", "1", False), ("off", "3", True), (None, None, False),
     ("true", None, False)],
)  # fmt: skip
def test_own_threads_work_where_the_librarys_are_switched_off(
    monkeypatch: pytest.MonkeyPatch, now: str | None, most: str | None, own_threads: bool
) -> None:
    monkeypatch.setattr(backend, "cores", lambda: 4)
    for name, value in (("TOKENIZERS_PARALLELISM", now), ("RAYON_NUM_THREADS", most)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    seen: set[str] = set()
    assert backend.over_threads(run_of(seen), TEXTS) == [text.upper() for text in TEXTS]
    assert any(name.startswith("flodl-hf-tokenise") for name in seen) == own_threads
    few: set[str] = set()
    assert backend.over_threads(run_of(few), TEXTS[:9]) == [text.upper() for text in TEXTS[:9]]
    assert few == {threading.current_thread().name}


def test_parts_give_the_encodings_of_the_whole_and_the_same_errors(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "cores", lambda: 3)
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    whole = tokenizer.encode_rows(TEXTS)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert tokenizer.encode_rows(TEXTS) == whole
    with pytest.raises(TokenizerError, match="surrogate"):
        tokenizer.encode_rows([*TEXTS, "\ud800"])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("flodl-hf-tokenise")]


def test_one_text_alone_is_tokenised_as_in_a_batch(tokenizer: Tokenizer) -> None:
    together = tokenizer.encode_rows(TEXTS[:5])
    assert [tokenizer.encode_rows([text])[0] for text in TEXTS[:5]] == together
    pairs = tokenizer.encode_rows(TEXTS[:3], TEXTS[3:6])
    assert [tokenizer.encode_rows([a], [b])[0] for a, b in zip(TEXTS[:3], TEXTS[3:6], strict=True)] == pairs
    words = [text.split() for text in TEXTS[:3]]
    assert [tokenizer.encode_rows([w], words=True)[0] for w in words] == tokenizer.encode_rows(words, words=True)
