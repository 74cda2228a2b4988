"""Tokenizer classes with settings, called in every way that transformers' own tests call them."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from flodl_hf.tokenization.backend import joins_words
from tests.flodl_hf.text import test_tokenizer_classes as made
from tests.flodl_hf.text.conftest import AWKWARD, CORPUS, byte_level, wordpiece
from tests.peers.case import Case

__all__ = ["cases"]

WORDS, BYTES = made.word_pieces, made.byte_pieces
FUNNEL = partial(WORDS, "<pad>", "<unk>", "<cls>", "<sep>", "<mask>")
MPNET = partial(WORDS, "<s>", "<pad>", "</s>", "[UNK]", "<mask>")
ALBERT = made.spm("spiece.model", **made.ALBERT)
XLMR = made.spm("sentencepiece.bpe.model", **made.ROBERTA)


def with_added(first: int, stated: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with the added tokens whose flags they contain, numbered after the vocabulary."""
    flags = stated.get("added")
    names = enumerate(("NewTok", "Élève", "new tok"), first)
    entries = {str(number): {"content": text, **(flags or {})} for number, text in names}
    return stated if flags is None else {"added_tokens_decoder": entries}


def definition(inner: Callable[[], Any], **changes: Any) -> dict[str, bytes]:
    return {"tokenizer.json": json.dumps({**json.loads(inner().to_str()), **changes}).encode()}


LOWER = [{"do_lower_case": low, "strip_accents": strip} for low in (True, False) for strip in (True, False, None)]
SIDES = [{"truncation_side": "left"}, {"padding_side": "left"}, {"model_max_length": 12}]
FLAGS = [
    {"normalized": True}, {"normalized": False}, {"lstrip": True}, {"rstrip": True}, {"special": True},
    {"lstrip": True, "rstrip": True, "normalized": True}, {"single_word": True}, {"special": True, "normalized": True},
]  # fmt: skip
ADDED = [{"added": flags} for flags in FLAGS]
# Class, family, files, settings of tokenizer_config.json, of which each is a case.
TABLE: list[tuple[str, str, Callable[[], dict[str, bytes]], list[dict[str, Any]]]] = [
    ("BertTokenizer", "bert", WORDS, [
        {}, *LOWER, *SIDES, *ADDED, {"tokenize_chinese_chars": False}, {"never_split": ["Ada"]},
        {"additional_special_tokens": ["<new>", "Ada"]}, {"extra_special_tokens": {"image_token": "<new>"}},
        {"mask_token": "<mask>"}, {"cls_token": "[SEP]"}, {"clean_up_tokenization_spaces": True},
        {"clean_up_tokenization_spaces": False}, {"model_input_names": ["input_ids", "attention_mask"]},
        {"mask_token": {"content": "[MASK]", "lstrip": True, "__type": "AddedToken"}}, {"split_special_tokens": True},
    ]),
    ("BertTokenizer", "bert", partial(definition, wordpiece), [
        {}, *LOWER[:2], *LOWER[3:5], *SIDES, *ADDED[:3], {"clean_up_tokenization_spaces": True},
    ]),
    ("BertTokenizer", "bert", partial(definition, wordpiece, post_processor=None), [{}]),
    ("RobertaTokenizer", "roberta", partial(definition, byte_level, post_processor=None), [{}, {"add_prefix_space": True}]),
    ("PreTrainedTokenizerFast", "bert", partial(definition, wordpiece), [
        {}, {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"},
    ]),
    ("DistilBertTokenizer", "distilbert", WORDS, [{}, *LOWER[2:4], ADDED[0]]),
    ("ElectraTokenizer", "electra", WORDS, [{}, *LOWER[3:], ADDED[1]]),
    ("MPNetTokenizer", "mpnet", MPNET, [{}, *LOWER[:4], ADDED[0]]),
    ("FunnelTokenizer", "bert", FUNNEL, [{}, *LOWER[2:4]]),
    ("RobertaTokenizer", "roberta", BYTES, [
        {}, {"add_prefix_space": True}, {"trim_offsets": False}, *SIDES, *ADDED,
        {"mask_token": {"content": "<mask>", "lstrip": True, "__type": "AddedToken"}}, {"errors": "ignore"},
    ]),
    ("RobertaTokenizer", "roberta", partial(definition, byte_level), [{}, {"add_prefix_space": True}, *SIDES]),
    ("GPT2Tokenizer", "roberta", BYTES, [{}, {"add_prefix_space": True}, {"add_bos_token": True}]),
    *((f"{name}Tokenizer", "roberta", BYTES, [{}]) for name in ("Bart", "Longformer", "LED", "Blenderbot", "Qwen2")),
    ("HerbertTokenizer", "bert", lambda: made.merged(made.suffixed()), [{}, *SIDES]),
    ("OpenAIGPTTokenizer", "roberta", lambda: made.merged(made.suffixed()), [{}]),
    ("PhobertTokenizer", "roberta", made.fairseq, [{}, *SIDES[:2]]),
    ("BertweetTokenizer", "roberta", made.fairseq, [{}, {"normalization": True}]),
    ("AlbertTokenizer", "albert", ALBERT, [
        {}, {"do_lower_case": False}, {"keep_accents": True}, *SIDES, *ADDED[:3], {"add_prefix_space": False},
    ]),
    ("XLMRobertaTokenizer", "xlm-roberta", XLMR, [{}, *SIDES, *ADDED[:4], {"add_prefix_space": False}]),
    ("CamembertTokenizer", "camembert", XLMR, [{}]),
    ("XLNetTokenizer", "bert", made.spm("spiece.model", **made.XLNET), [{}, {"do_lower_case": True}]),
    ("T5Tokenizer", "bert", made.spm("spiece.model", **made.T5), [{}, {"extra_ids": 10}]),
    ("RemBertTokenizer", "bert", made.spm("sentencepiece.model", **made.ALBERT), [{}, {"keep_accents": False}]),
    ("DebertaV2Tokenizer", "deberta-v2", made.spm("spm.model", **made.DEBERTA), [
        {}, {"do_lower_case": True}, {"split_by_punct": True}, {"add_prefix_space": False},
    ]),
    ("DebertaTokenizer", "deberta", partial(BYTES, "[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"), [{}]),
    *((f"{name}Tokenizer", "roberta", XLMR, [{}]) for name in ("MBart", "MBart50", "Barthez")),
    ("FNetTokenizer", "bert", made.spm("spiece.model", **made.ALBERT), [{}]),
    ("BigBirdTokenizer", "bert", made.spm("spiece.model", **made.ROBERTA), [{}]),
    ("PegasusTokenizer", "bert", made.spm("spiece.model", **made.T5), [{}]),
    ("ReformerTokenizer", "bert", made.spm("spiece.model", model_type="bpe", **made.T5), [{}]),
    ("BertGenerationTokenizer", "bert", made.spm("spiece.model", **made.GENERATION), [{}]),
    ("LlamaTokenizer", "roberta", made.spm("tokenizer.model", **made.LLAMA), [{}, {"add_bos_token": True}]),
    ("SplinterTokenizer", "bert", WORDS, [{}]),
]  # fmt: skip

OTHER = ["Ada lives in Paris", "a"]
CUT = {"truncation": True, "max_length": 6}
# What is called, on either side alike.
CALLS: dict[str, Callable[[Any, str], Any]] = {
    "call": lambda tok, text: tok(text),
    "pair": lambda tok, text: tok(text, OTHER[0]),
    "second of a pair": lambda tok, text: tok(OTHER[0], text),
    "without special tokens": lambda tok, text: tok(text, add_special_tokens=False),
    "encode": lambda tok, text: tok.encode(text, OTHER[0], add_special_tokens=False),
    "tokenize": lambda tok, text: tok.tokenize(text),
    "cut": lambda tok, text: tok(text, **CUT),
    "cut of a pair": lambda tok, text: tok(text, OTHER[0], truncation="longest_first", max_length=8),
    "cut of the first": lambda tok, text: tok(
        text + " the quick brown fox jumps", "a", truncation="only_first", max_length=9
    ),
    "cut of the second": lambda tok, text: tok(
        "a", text + " the quick brown fox jumps", truncation="only_second", max_length=9
    ),
    "cut to the model's length": lambda tok, text: tok(text, truncation=True),
    "padded": lambda tok, text: tok([text, *OTHER], padding=True),
    "padded to a length": lambda tok, text: tok([text, *OTHER], padding="max_length", max_length=12, truncation=True),
    "padded to a multiple": lambda tok, text: tok([text, *OTHER], padding=True, pad_to_multiple_of=8),
    "padded pairs": lambda tok, text: tok([text, "a"], [OTHER[0], text], padding=True),
    "tensors": lambda tok, text: tok([text, *OTHER], padding=True, return_tensors="pt"),
    "without a mask": lambda tok, text: tok(text, return_attention_mask=False, return_token_type_ids=True),
    "lengths": lambda tok, text: tok(text, return_length=True, return_special_tokens_mask=True),
    "split words": lambda tok, text: tok(text.split() or ["a"], is_split_into_words=True),
    "decode": lambda tok, text: tok.decode(tok(text)["input_ids"]),
    "decode without special": lambda tok, text: tok.decode(tok(text)["input_ids"], skip_special_tokens=True),
    "decode cleaned": lambda tok, text: tok.decode(tok(text)["input_ids"], clean_up_tokenization_spaces=True),
    "tokens of ids": lambda tok, text: tok.convert_ids_to_tokens(tok(text)["input_ids"]),
    "ids of tokens": lambda tok, text: tok.convert_tokens_to_ids(tok.tokenize(text)),
    "batch decode": lambda tok, text: tok.batch_decode(tok([text, *OTHER])["input_ids"]),
}
# Of tokenizers with a definition only.
FAST: dict[str, Callable[[Any, str], Any]] = {
    "offsets": lambda tok, text: tok(text, OTHER[0], return_offsets_mapping=True),
    "windows": lambda tok, text: tok(
        text, **CUT, stride=2, return_overflowing_tokens=True, return_offsets_mapping=True
    ),
    "words": lambda tok, text: [tok(text).word_ids(), tok(text).tokens(), tok(text).sequence_ids()],
    "places": lambda tok, text: [tok(text).char_to_token(place) for place in range(min(len(text), 9))],
}
FACTS: dict[str, Callable[[Any], Any]] = {
    **{name: lambda tok, name=name: getattr(tok, name) for name in (
        "cls_token", "sep_token", "mask_token", "unk_token", "pad_token_id", "all_special_tokens", "all_special_ids",
        "special_tokens_map", "padding_side", "truncation_side", "model_input_names",
    )},
    "length": len,
    "vocabulary": lambda tok: tok.get_vocab(),
    "added tokens": lambda tok: tok.get_added_vocab(),
}  # fmt: skip


def texts() -> list[str]:
    """Return texts that were wrong before, and random ones of many scripts."""
    draw = random.Random(27)
    spans = [
        (32, 127),
        (0xA0, 0x250),
        (0x370, 0x530),
        (0x590, 0x700),
        (0x3040, 0x3100),
        (0x4E00, 0x5000),
        (0xAC00, 0xAD00),
    ]
    spans += [(0x1F600, 0x1F650), (0x2000, 0x2070), (0xFF00, 0xFF60), (0x1D400, 0x1D450), (0xE0, 0x100)]
    picked = [[chr(draw.randrange(*draw.choice(spans))) for _ in range(draw.randrange(1, 24))] for _ in range(16)]
    return [
        *AWKWARD, *CORPUS[:13], *map("".join, picked), "a NewTok b", "aNEWTOKb newtok", "  NewTok  élève Élève",
        "hello [MASK] there", "see <mask> now", "New Tok new tok <new>", "[CLS] a [SEP]", "Ada ADA", " ÉTÉ\u00ad",
    ]  # fmt: skip


def glues(theirs: Any) -> bool:
    """Return whether transformers joins split words without spaces; this library warns, and joins them by spaces."""
    first = theirs.backend_tokenizer.pre_tokenizer if theirs.is_fast else None
    return first is not None and joins_words(json.loads(first.__getstate__()))


def cases(room: Path, *, quick: bool = False) -> Iterator[Case]:
    """Return each class with each setting, in every call, over every text."""
    from transformers import AutoTokenizer

    from flodl_hf.tokenization.tokenizer import Tokenizer

    number = itertools.count()
    for name, family, files, settings in TABLE[:1] + TABLE[9:10] if quick else TABLE:
        for stated in settings[::4] if quick else settings:
            stored = files()
            folder = room / str(next(number))
            folder.mkdir()
            made.folder_of(folder, name, family, stored, {})
            first = len(AutoTokenizer.from_pretrained(folder)) if "added" in stated else 0
            made.folder_of(folder, name, family, stored, with_added(first, stated))
            title = f"{name}, {family}, {'tokenizer.json' if 'tokenizer.json' in stored else 'plain files'}, {stated}"
            try:
                theirs = AutoTokenizer.from_pretrained(folder)
                ours = Tokenizer.from_folder(folder)
            except Exception:
                yield Case(
                    title, partial(AutoTokenizer.from_pretrained, folder), partial(Tokenizer.from_folder, folder)
                )
                continue
            for what, fact in () if quick else FACTS.items():
                yield Case(f"{title}: {what}", partial(fact, theirs), partial(fact, ours))
            without = ("split words",) if glues(theirs) else ()
            for what, call in list((CALLS | FAST if theirs.is_fast else CALLS).items())[:: 2 if quick else 1]:
                for text in texts()[:: 5 if quick else 1]:
                    if what not in without:
                        yield Case(
                            f"{title}: {what} of {text!r}", partial(call, theirs, text), partial(call, ours, text)
                        )
