"""Tokenizer classes of transformers: which files each reads, and the rules by which a tokenizer is built from them.

The rules of the classes that belong to a family of this package are in the family's file; the table below contains the
others, as transformers 5 builds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flodl_hf.families.schema import FamilyTokenizer

# Builders of tokenizers with Python code that splits words.
PYTHON_BUILDERS = ("fairseq", "bertweet", "japanese", "sentencepiece")

# Families for which transformers has no tokenizer class, so that their tokenizer.json is used as it is.
WITHOUT_CLASS = ("modernbert", "xlm-roberta-xl", "new", "eurobert", "jina_bert", "jina_embeddings_v3_tasks")

# Classes that only wrap tokenizer.json, so that the family decides.
GENERIC = ("", "pretrained", "tokenizersbackend", "pythonbackend", "auto")

_ROBERTA = {
    "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>", "pad_token": "<pad>",
    "cls_token": "<s>", "mask_token": "<mask>",
}  # fmt: skip
_GPT2: Mapping[str, str] = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
_BERT = {
    "unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]",
}  # fmt: skip
_ALBERT = {**_BERT, "bos_token": "[CLS]", "eos_token": "[SEP]", "unk_token": "<unk>", "pad_token": "<pad>"}
_MBART = (
    "ar_AR", "cs_CZ", "de_DE", "en_XX", "es_XX", "et_EE", "fi_FI", "fr_XX", "gu_IN", "hi_IN", "it_IT", "ja_XX",
    "kk_KZ", "ko_KR", "lt_LT", "lv_LV", "my_MM", "ne_NP", "nl_XX", "ro_RO", "ru_RU", "si_LK", "tr_TR", "vi_VN",
    "zh_CN",
)  # fmt: skip
_MBART50 = (
    *_MBART,
    "af_ZA", "az_AZ", "bn_IN", "fa_IR", "he_IL", "hr_HR", "id_ID", "ka_GE", "km_KH", "mk_MK", "ml_IN", "mn_MN",
    "mr_IN", "pl_PL", "ps_AF", "pt_XX", "sv_SE", "sw_KE", "ta_IN", "te_IN", "th_TH", "tl_XX", "uk_UA", "ur_PK",
    "xh_ZA", "gl_ES", "sl_SI",
)  # fmt: skip
_FAIRSEQ = ("bos_token", "pad_token", "eos_token", "unk_token")
_BYTES = ("vocab.json", "merges.txt")
_SPIECE = ("spiece.model",)
_BPE_MODEL = ("sentencepiece.bpe.model",)

_byte_level = FamilyTokenizer(special=_GPT2, type_ids=False, files=_BYTES, template="none")
_suffixed = FamilyTokenizer(special={"unk_token": "<unk>"}, type_ids=False, files=_BYTES, build="suffixed")
_fairseq = FamilyTokenizer(
    special=_ROBERTA, type_ids=False, files=("vocab.txt", "bpe.codes"), build="fairseq", template="doubled"
)

# By the name without "Tokenizer".
CLASSES: Mapping[str, FamilyTokenizer] = {
    "BertJapanese": FamilyTokenizer(
        special=_BERT, type_ids=False, files=("vocab.txt",), build="japanese", lowercase=False
    ),
    "Funnel": FamilyTokenizer(
        special={**_ROBERTA, "sep_token": "<sep>", "cls_token": "<cls>"}, type_ids=False, files=("vocab.txt",),
        lowercase=True, template="funnel",
    ),
    "Splinter": FamilyTokenizer(
        special={**_BERT, "question_token": "[QUESTION]"}, type_ids=False, files=("vocab.txt",), lowercase=True,
        template="splinter",
    ),
    # Byte-level BPE
    "GPT2": _byte_level,
    "CodeGen": replace(_byte_level, template="bytes"),
    "GPTNeoX": replace(_byte_level, special={**_GPT2, "pad_token": "<|padding|>"}, build="byte_level_nfc"),
    "Qwen2": replace(
        _byte_level, special=dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"), build="qwen2"
    ),
    "Blenderbot": replace(_byte_level, special=_ROBERTA, prefix=True, mask_takes_space=True),
    # BPE with "</w>" at the end of words
    "Herbert": replace(
        _suffixed,
        special={role: _ROBERTA[role] for role in ("cls_token", "unk_token", "pad_token", "mask_token", "sep_token")},
    ),
    "OpenAIGPT": replace(_suffixed, lowercase=True, template="none"),
    # BPE with "@@" inside of words
    "Phobert": _fairseq,
    "Bertweet": replace(_fairseq, build="bertweet"),
    # Sentencepiece
    "T5": FamilyTokenizer(
        special={"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}, type_ids=False, files=_SPIECE,
        build="pieces", template="ends", last=("extra_ids",), unknown=2, steps=("charsmap",), spaces="words",
    ),
    "Pegasus": FamilyTokenizer(
        special={"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask_2>"},
        type_ids=False, files=_SPIECE, build="pieces", template="end", skipped=2,
        first=("pad_token", "eos_token", "mask_token=<mask_1>", "mask_token_sent=<mask_2>",
               *(f"<unk_{number}>" for number in range(2, 103))),
        steps=("charsmap or lines", "spaces"), spaces="always",
    ),
    "XLNet": FamilyTokenizer(
        special={**_ROBERTA, "sep_token": "<sep>", "cls_token": "<cls>"}, type_ids=False, files=_SPIECE,
        build="pieces", template="xlnet", mask_takes_space=True, padding_side="left", lowercase=False,
        steps=("quotes", "accents", "lower", "charsmap"), spaces="words",
    ),
    "RemBert": FamilyTokenizer(
        special=_ALBERT, type_ids=False, files=("sentencepiece.model",), build="pieces", template="none", prefix=True,
        lowercase=False, unknown=2, steps=("quotes", "spaces", "accents unless kept", "lower", "charsmap"),
        spaces="always",
    ),
    "BigBird": FamilyTokenizer(
        special={**_ROBERTA, "sep_token": "[SEP]", "mask_token": "[MASK]", "cls_token": "[CLS]"}, type_ids=False,
        files=_SPIECE, build="pieces", mask_takes_space=True, prefix=True, steps=("marked spaces",),
        spaces="always",
    ),
    "FNet": FamilyTokenizer(
        special=_ALBERT, type_ids=True, inputs=("input_ids", "token_type_ids"), files=_SPIECE, build="pieces",
        template="none", steps=("charsmap", "marks"),
    ),
    "Barthez": FamilyTokenizer(
        special=_ROBERTA, type_ids=False, files=_BPE_MODEL, build="pieces", template="none", mask_takes_space=True,
        prefix=True, unknown=3, steps=("blanks",), spaces="always",
    ),
    "MBart": FamilyTokenizer(
        special={**_ROBERTA, "src_lang": "en_XX"}, type_ids=False, files=_BPE_MODEL, build="pieces",
        template="language last", mask_takes_space=True, first=_FAIRSEQ, skipped=3, last=(*_MBART, "mask_token"),
        unknown=3, spaces="words",
    ),
    "MBart50": FamilyTokenizer(
        special={**{role: _ROBERTA[role] for role in _ROBERTA if role != "bos_token"}, "src_lang": "en_XX"},
        type_ids=False, files=_BPE_MODEL, build="pieces", template="language first", mask_takes_space=True,
        first=("cls_token", *_FAIRSEQ[1:]), skipped=3, last=(*_MBART50, "mask_token"), unknown=3,
        steps=("charsmap", "spaces"), spaces="always",
    ),
    "Reformer": FamilyTokenizer(
        special={"eos_token": "</s>", "unk_token": "<unk>"}, type_ids=False, files=_SPIECE, build="bpe",
        template="none", steps=("charsmap", "spaces"), spaces="always",
    ),
    "Llama": FamilyTokenizer(
        special={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, type_ids=False,
        files=("tokenizer.model",), build="llama", template="none", padding_side="left", prefix=True,
    ),
    "BertGeneration": FamilyTokenizer(
        special={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>",
                 "sep_token": "<::::>"},
        type_ids=False, files=_SPIECE, build="sentencepiece", template="none",
    ),
}  # fmt: skip

# Classes that transformers builds like one of the table or of a family.
ALIASES = {
    **dict.fromkeys(
        ("ConvBert", "DPRContextEncoder", "DPRQuestionEncoder", "LayoutLM", "Lxmert", "MobileBert",
         "RetriBert", "SqueezeBert"),
        "bert",
    ),
    **dict.fromkeys(("Bart", "LED", "Longformer", "Mvp"), "roberta"),
    "DPRReader": "distilbert",
    "MT5": "t5",
    "Phi3": "llama",
}  # fmt: skip
