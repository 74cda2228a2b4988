"""Write golden_qa_4_57.json: what the question-answering pipeline of transformers 4.57 answers.

Not a test. Run with an interpreter that has transformers 4.57 (4.57.6 made the stored file):

    python tests/flodl_hf/decode/record_qa_4_57.py

A tiny random BERT and two tiny tokenizers with vocabularies written here give logits; the real pipeline reads them. Rounded logits make
ties, whose order is part of what is recorded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    PreTrainedTokenizerFast,
    QuestionAnsweringPipeline,
)

CORPUS = [
    "Ada Lovelace lived in London and wrote the first program for the Analytical Engine.",
    "The bridge was built in 1894, repaired in 1976 and closed in 1994 by Jean-Pierre O'Connor.",
    "Where did Ada live? In London. Who built the bridge? When was the engine closed?",
    "Zürich, naïve café, 東京 and the U.S. Navy: prices rose 3.14 % on 12/05.",
]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


QUESTION = "Where did Ada live?"
SHORT = "Ada Lovelace lived in London."
LONG = " ".join(CORPUS)
TWICE = "London was LONDON, and London is london; Ada in London, Ada in London. " * 3
CONTEXTS = {"short": SHORT, "long": LONG, "twice": TWICE, "odd": "  naïve\u00a0café 東京, [CLS] and 3.14 %… "}

# Vocabularies are written out, not trained: training breaks ties at random.
WHOLE = [
    "the",
    "in",
    "was",
    "and",
    "London",
    "bridge",
    "built",
    "Engine",
    "lived",
    "Ada",
    "program",
    "close",
    "price",
    "rose",
    "Jean",
]
PARTS = ["ing", "er", "on", "Love", "pair", "ca", "Con", "Nav", "d", "s", "e"]


def wordpiece(with_cls: bool = True, **options: Any) -> PreTrainedTokenizerFast:
    letters = sorted({letter for text in [*CORPUS, *CONTEXTS.values()] for letter in text.lower() if letter.strip()})
    whole = [word.lower() for word in WHOLE]
    parts = [f"##{part.lower()}" for part in PARTS]
    pieces = dict.fromkeys([*SPECIALS, *letters, *(f"##{letter}" for letter in letters), *whole, *parts])
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return finished(tokenizer, with_cls, **options)


def byte_bpe(**options: Any) -> PreTrainedTokenizerFast:
    merges = dict.fromkeys((word[:i], word[i]) for word in [f"Ġ{w}" for w in WHOLE] for i in range(1, len(word)))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = dict.fromkeys([*SPECIALS, *alphabet, *("".join(pair) for pair in merges)])
    tokenizer = Tokenizer(models.BPE({piece: place for place, piece in enumerate(pieces)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return finished(tokenizer, **options)


def finished(tokenizer: Tokenizer, with_cls: bool = True, **options: Any) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]" if with_cls else "$A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1" if with_cls else "$A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token="[CLS]" if with_cls else None,
        sep_token="[SEP]",
        pad_token="[PAD]",
        unk_token="[UNK]",
        mask_token="[MASK]",
        model_max_length=128,
        **options,
    )


class Rounded(torch.nn.Module):
    """A linear layer whose outputs are multiples of ``step``: a small one keeps the file short, a large one makes ties."""

    def __init__(self, linear: torch.nn.Linear, step: float) -> None:
        super().__init__()
        self.linear, self.step = linear, step

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.round(self.linear(hidden) * 12 / self.step) * self.step


def model(seed: int, step: float, dtype: torch.dtype) -> BertForQuestionAnswering:
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=450,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=128,
        initializer_range=0.6,
    )
    made = BertForQuestionAnswering(config).eval()
    made.qa_outputs = Rounded(made.qa_outputs, step)
    return made.to(dtype)


def cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    windowed = {"max_seq_len": 40, "doc_stride": 12}
    for context in CONTEXTS:
        for k in (1, 3):
            found.append({"context": context, "options": {"top_k": k, **windowed}})
    for options in (
        {"top_k": 20, "handle_impossible_answer": True},
        {"top_k": 1, "handle_impossible_answer": True},
        {"top_k": 5, "align_to_words": False},
        {"top_k": 1, "align_to_words": False},
        {"top_k": 4, "max_answer_len": 1},
        {"top_k": 4, "max_answer_len": 60},
    ):
        for context in ("short", "long"):
            found.append({"context": context, "options": {**options, **windowed}})
    found.append({"context": "short", "options": {"top_k": 300, "align_to_words": False}})
    found.append({"context": "short", "options": {"top_k": 300, "handle_impossible_answer": True}})
    return found


def recorded(case: dict[str, Any], tokenizer: PreTrainedTokenizerFast, net: BertForQuestionAnswering) -> dict[str, Any]:
    pipe = QuestionAnsweringPipeline(model=net, tokenizer=tokenizer, device="cpu")
    seen: list[dict[str, Any]] = []
    original = pipe.postprocess

    def postprocess(outputs: list[dict[str, Any]], **options: Any) -> Any:
        for output in outputs:
            encoding = output["encoding"]
            seen.append(
                {
                    "ids": encoding.ids,
                    "type_ids": encoding.type_ids,
                    "offsets": encoding.offsets,
                    "word_ids": encoding.word_ids,
                    "sequence_ids": encoding.sequence_ids,
                    "special": [bool(flag) for flag in encoding.special_tokens_mask],
                    "start": output["start"][0].float().tolist(),
                    "end": output["end"][0].float().tolist(),
                }
            )
        return original(outputs, **options)

    pipe.postprocess = postprocess
    answer = pipe(question=QUESTION, context=CONTEXTS[case["context"]], **case["options"])
    options = {k: v for k, v in case["options"].items() if k not in ("max_seq_len", "doc_stride")}
    return {
        "context": CONTEXTS[case["context"]],
        "options": options,
        "cls_id": tokenizer.cls_token_id,
        "sequence": 1 if tokenizer.padding_side == "right" else 0,
        "dtype": str(net.dtype).removeprefix("torch."),
        "windows": seen,
        "answer": answer,
    }


def main() -> None:
    table = []
    kinds = [
        (wordpiece(), 0, 1 / 64, torch.float32),
        (wordpiece(), 1, 0.5, torch.float32),
        (byte_bpe(), 2, 1 / 64, torch.float32),
        (wordpiece(padding_side="left"), 3, 1.0, torch.float32),
        (wordpiece(), 4, 1 / 64, torch.bfloat16),
        (wordpiece(), 5, 1 / 64, torch.float16),
        (wordpiece(with_cls=False), 6, 1.0, torch.float32),
    ]
    every = cases()
    chosen_for = [every, every[::2], every[::4], every[::5], every[::6], every[::6], every[-2:] + every[:3]]
    for chosen, (tokenizer, seed, step, dtype) in zip(chosen_for, kinds, strict=True):
        table += [recorded(case, tokenizer, model(seed, step, dtype)) for case in chosen]
    path = Path(__file__).with_name("golden_qa_4_57.json")
    lines = ",\n".join(json.dumps(row, separators=(",", ":"), ensure_ascii=False) for row in table)
    path.write_text(f'{{"transformers": "{transformers.__version__}", "cases": [\n{lines}\n]}}\n', encoding="utf-8")
    print(f"{len(table)} cases, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
