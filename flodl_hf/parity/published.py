"""Published checkpoints on which ``verify-matrix --live`` proves each family of this package, by family and task.

A catalogue of checkpoints on the Hub, independent of how a family computes. A family from another
package lists its checkpoints in its record (`flodl_hf.families.schema.Family.checkpoints`).
"""

from __future__ import annotations

from collections.abc import Mapping

from flodl_hf.families.schema import Family

PUBLISHED: Mapping[str, Mapping[str, str]] = {
    "bert": {
        "base": "google-bert/bert-base-uncased",
        "sequence_classification": "nateraw/bert-base-uncased-emotion",
        "token_classification": "dslim/bert-base-NER",
        "question_answering": "csarron/bert-base-uncased-squad-v1",
        "masked_lm": "google-bert/bert-base-uncased",
    },
    "roberta": {
        "base": "FacebookAI/roberta-base",
        "sequence_classification": "cardiffnlp/twitter-roberta-base-sentiment-latest",
        "token_classification": "Jean-Baptiste/roberta-large-ner-english",
        "question_answering": "deepset/roberta-base-squad2",
        "masked_lm": "FacebookAI/roberta-base",
    },
    "xlm-roberta": {
        "base": "FacebookAI/xlm-roberta-base",
        "sequence_classification": "cardiffnlp/twitter-xlm-roberta-base-sentiment",
        "token_classification": "Davlan/xlm-roberta-large-ner-hrl",
        "question_answering": "deepset/xlm-roberta-large-squad2",
        "masked_lm": "FacebookAI/xlm-roberta-base",
    },
    "distilbert": {
        "base": "distilbert/distilbert-base-uncased",
        "sequence_classification": "lxyuan/distilbert-base-multilingual-cased-sentiments-student",
        "token_classification": "dslim/distilbert-NER",
        "question_answering": "distilbert/distilbert-base-cased-distilled-squad",
        "masked_lm": "distilbert/distilbert-base-uncased",
    },
    "albert": {
        "base": "albert/albert-base-v2",
        "sequence_classification": "bhadresh-savani/albert-base-v2-emotion",
        "token_classification": "ArBert/albert-base-v2-finetuned-ner",
        "question_answering": "twmkn9/albert-base-v2-squad2",
        "masked_lm": "albert/albert-base-v2",
    },
    "deberta-v2": {
        "base": "microsoft/deberta-v3-base",
        "sequence_classification": "MoritzLaurer/DeBERTa-v3-base-mnli-fever-anli",
        "token_classification": "blaze999/Medical-NER",
        "question_answering": "deepset/deberta-v3-base-squad2",
    },
    "deberta": {"base": "microsoft/deberta-base", "sequence_classification": "microsoft/deberta-base-mnli"},
    "electra": {
        "base": "google/electra-base-discriminator",
        "sequence_classification": "cross-encoder/ms-marco-electra-base",
        "question_answering": "deepset/electra-base-squad2",
        "masked_lm": "google/electra-small-generator",
    },
    "mpnet": {"base": "sentence-transformers/all-mpnet-base-v2", "masked_lm": "microsoft/mpnet-base"},
    "modernbert": {
        "base": "answerdotai/ModernBERT-base",
        "sequence_classification": "Alibaba-NLP/gte-reranker-modernbert-base",
        "masked_lm": "answerdotai/ModernBERT-base",
    },
    "nomic_bert": {"base": "nomic-ai/nomic-embed-text-v1.5"},
    "gte": {"base": "alibaba-nlp-community/gte-multilingual-base"},
    "new": {"base": "Alibaba-NLP/gte-multilingual-base"},
    "eurobert": {"base": "EuroBERT/EuroBERT-210m", "masked_lm": "EuroBERT/EuroBERT-210m"},
    "jina_embeddings_v3": {"base": "jinaai/jina-embeddings-v3-hf"},
    "esm": {"base": "facebook/esm2_t6_8M_UR50D", "masked_lm": "facebook/esm2_t6_8M_UR50D"},
}


def checkpoints_of(family: Family) -> Mapping[str, str]:
    """Return the published checkpoint of each task of a family that has one."""
    return family.checkpoints or PUBLISHED.get(family.model_type, {})
