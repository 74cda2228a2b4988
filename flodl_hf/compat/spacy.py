"""Components for spaCy's pipelines: named entities and categories of texts.

Importing this module registers "flodl_ner" and "flodl_textcat": ``nlp.add_pipe("flodl_ner", config={"model": ...})``.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from spacy.language import Language
from spacy.tokens import Doc
from spacy.util import filter_spans, minibatch

from flodl_hf.compat import model_of

__all__ = ["EntityComponent", "TextCategoryComponent"]


class _Component:
    """A component that predicts one result for each document."""

    head: str

    def __init__(self, model: Any) -> None:
        self.model = model_of(model, self.head)

    def __call__(self, doc: Doc) -> Doc:
        return next(self.pipe([doc]))

    def pipe(self, docs: Iterable[Doc], batch_size: int = 128) -> Iterator[Doc]:
        """Yield the documents with their predictions."""
        for batch in minibatch(docs, batch_size):
            batch = list(batch)
            for doc, found in zip(batch, self.model.predict([doc.text for doc in batch]), strict=True):
                self.annotate(doc, found)
                yield doc

    def annotate(self, doc: Doc, prediction: Any) -> None:
        """Write a prediction into a document."""
        raise NotImplementedError


class EntityComponent(_Component):
    """Sets ``doc.ents``; an entity that ends inside of a token of spaCy covers the whole token."""

    head = "token_classification"

    def annotate(self, doc: Doc, prediction: Any) -> None:
        """Write entities into a document."""
        spans = [doc.char_span(one.start, one.end, label=one.label, alignment_mode="expand") for one in prediction]
        doc.ents = filter_spans([span for span in spans if span is not None])


class TextCategoryComponent(_Component):
    """Sets ``doc.cats``, the score of each label."""

    head = "sequence_classification"

    def annotate(self, doc: Doc, prediction: Any) -> None:
        """Write the scores of labels into a document."""
        doc.cats = {one.label: float(one.score) for one in prediction}


@Language.factory("flodl_ner")
def _entities(nlp: Language, name: str, model: str) -> EntityComponent:
    return EntityComponent(model)


@Language.factory("flodl_textcat")
def _categories(nlp: Language, name: str, model: str) -> TextCategoryComponent:
    return TextCategoryComponent(model)
