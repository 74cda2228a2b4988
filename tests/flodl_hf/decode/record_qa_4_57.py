"""Write golden_qa_4_57.json: what the question-answering pipeline of transformers 4.57 answers.

Not a test. Run with an interpreter that has transformers 4.57 (4.57.6 made the stored file):

    python tests/flodl_hf/decode/record_qa_4_57.py

A tiny random BERT and two tiny tokenizers trained here give logits; the real pipeline reads them. Rounded logits make
ties, whose order is part of what is recorded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
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


def wordpiece(**options: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=150, special_tokens=SPECIALS))
    return finished(tokenizer, **options)


def byte_bpe(**options: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIALS, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return finished(tokenizer, **options)


def finished(tokenizer: Tokenizer, **options: Any) -> PreTrainedTokenizerFast:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        unk_token="[UNK]",
        mask_token="[MASK]",
        model_max_length=128,
        **options,
    )


class Rounded(torch.nn.Module):
    """A linear layer whose outputs are multiples of ``step``, so that spans tie."""

    def __init__(self, linear: torch.nn.Linear, step: float) -> None:
        super().__init__()
        self.linear, self.step = linear, step

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.linear(hidden) * 12
        return torch.round(logits / self.step) * self.step if self.step else logits


def model(seed: int, step: float, dtype: torch.dtype) -> BertForQuestionAnswering:
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=400,
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


QUESTION = "Where did Ada live?"
SHORT = "Ada Lovelace lived in London."
LONG = " ".join(CORPUS)
TWICE = "London was LONDON, and London is london; Ada in London, Ada in London. " * 3
CONTEXTS = {"short": SHORT, "long": LONG, "twice": TWICE, "odd": "  naïve\u00a0café 東京, [CLS] and 3.14 %… "}


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
        (wordpiece(), 0, 0.0, torch.float32),
        (wordpiece(), 1, 0.5, torch.float32),
        (byte_bpe(), 2, 0.0, torch.float32),
        (wordpiece(padding_side="left"), 3, 1.0, torch.float32),
        (wordpiece(), 4, 0.0, torch.bfloat16),
        (wordpiece(), 5, 0.0, torch.float16),
    ]
    for number, (tokenizer, seed, step, dtype) in enumerate(kinds):
        chosen = cases() if number < 2 else cases()[:: (2 if number == 2 else 5)]
        table += [recorded(case, tokenizer, model(seed, step, dtype)) for case in chosen]
    path = Path(__file__).with_name("golden_qa_4_57.json")
    lines = ",\n".join(json.dumps(row, separators=(",", ":"), ensure_ascii=False) for row in table)
    path.write_text(f'{{"transformers": "{transformers.__version__}", "cases": [\n{lines}\n]}}\n', encoding="utf-8")
    print(f"{len(table)} cases, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
