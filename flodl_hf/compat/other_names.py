"""Names that users of transformers, sentence-transformers and peft import, and their equivalents here."""

from __future__ import annotations

import re

from flodl_hf.families.schema.tasks import HEADS

LOADED = "flodl_hf.load(folder or name) returns the model"
NAMES = {
    "Trainer": "flodl_hf.finetune(model, train=..., eval=...) trains a checkpoint; flodl.train.Trainer trains a module",
    "TrainingArguments": "flodl_hf.finetune takes the same values as keywords, such as learning_rate=2e-5",
    "SentenceTransformer": f"{LOADED}; its encode returns vectors",
    "SparseEncoder": f"{LOADED}; its embed_sparse returns sparse vectors",
    "CrossEncoder": f"{LOADED}; its predict scores pairs and its rerank orders documents",
    "InputExample": "flodl_hf.finetune(train=...) takes dicts, such as {'anchor': ..., 'positive': ...}",
    "losses": "flodl_hf.finetune(loss='MultipleNegativesRankingLoss') accepts the name of a loss",
    "evaluation": "flodl_hf.evaluate(model, data) evaluates a model",
    "util": "flodl_hf.inference.similarity contains functions for similarities of vectors",
    "LoraConfig": "flodl_hf.models.adapters.Lora, which takes the same arguments: finetune(adapter=Lora(r=8))",
    "IA3Config": "flodl_hf.models.adapters.IA3, which takes the same arguments: finetune(adapter=IA3())",
    "PromptTuningConfig": "flodl_hf.models.adapters.Prompt, which takes the same arguments",
    "PromptEncoderConfig": "flodl_hf.models.adapters.Prompt(encoder=width), which takes the same arguments",
    "PrefixTuningConfig": "flodl_hf.models.adapters.Prefix, which takes the same arguments",
    "PeftModel": "flodl_hf.load(folder of an adapter) returns the model with the adapter",
    "get_peft_model": "model.add_adapter(Lora(...)), with Lora of flodl_hf.models.adapters",
    "set_seed": "flodl_hf.finetune(seed=...)",
    "get_scheduler": "flodl_hf.finetune(schedule='cosine', warmup=0.1)",
    "AutoModelWithLMHead": "flodl_hf.AutoModelForMaskedLM",
    "Pipeline": "flodl_hf.pipeline(task, model)",
}
PATTERNS = (
    (rf"\w+({'|'.join(head.hf_suffix for head in HEADS[1:])})", r"flodl_hf.AutoModel\1, which loads every family"),
    (r"\w+For[A-Z]\w+", "flodl_hf has no equivalent: it contains encoders of text and their heads"),
    (r"(SentenceTransformer|SparseEncoder|CrossEncoder)\w*Trainer", "flodl_hf.finetune(model, task=..., train=...)"),
    (r"\w+TrainingArguments", NAMES["TrainingArguments"]),
    (r"\w*Trainer", NAMES["Trainer"]),
    (r"\w*Tokenizer(Fast|Base)?", "flodl_hf.AutoTokenizer, which reads the tokenizer files of every family"),
    (r"(DataCollator\w*|default_data_collator)", "flodl_hf.finetune makes batches itself; leave the collator out"),
    (r"\w*Callback", "flodl.train.Callback, for finetune(callbacks=[...])"),
    (r"\w+Pipeline", NAMES["Pipeline"]),
    (r"\w+Evaluator", NAMES["evaluation"]),
    (r"\w+Loss", NAMES["losses"]),
    (r"(Pretrained|PreTrained|Auto)?\w*Config", "flodl_hf.AutoConfig, which reads every family"),
    (r"\w*Model", "flodl_hf.AutoModel, which loads every family"),
    (r"Auto[A-Z]\w+", "flodl_hf has no equivalent: it contains encoders of text and their heads"),
)


def equivalent(name: str) -> str | None:
    """Return the equivalent of a name of another library; None for other names."""
    if name in NAMES:
        return NAMES[name]
    for pattern, text in PATTERNS:
        found = re.fullmatch(pattern, name)
        if found:
            return found.expand(text) if "\\1" in text else text
    return None
