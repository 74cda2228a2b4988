"""Configurations of encoders that people download most, as their ``config.json`` has them.

Written down from the published files: sizes, labels and every odd key, which is what these tests are about. Long label
lists are cut, with their number kept. What several share stands once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["FURTHER", "PUBLISHED", "REFUSED"]

Config = dict[str, Any]


def labels(*names: str) -> Config:
    """Return both label tables."""
    return {"id2label": {str(i): name for i, name in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}


def arch(name: str) -> Config:
    """Return the class that a file was written for."""
    return {"architectures": [name]}


def sizes(hidden: int, layers: int, heads: int, inner: int) -> Config:
    """Return the sizes of a stack."""
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": inner,
    }  # fmt: skip


BASE, LARGE = sizes(768, 12, 12, 3072), sizes(1024, 24, 16, 4096)
DROPOUT = {"attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1}
RECENT = {"classifier_dropout": None, "position_embedding_type": "absolute", "use_cache": True}
FIRST_POOLER = {
    "directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3,
    "pooler_size_per_head": 128, "pooler_type": "first_token_transform",
}  # fmt: skip
# What transformers 2 wrote into every file.
GENERATION = {
    "bos_token_id": None, "do_sample": False, "eos_token_id": None, "is_decoder": False, "is_encoder_decoder": False,
    "length_penalty": 1.0, "max_length": 20, "num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0,
    "temperature": 1.0, "top_k": 50, "top_p": 1.0, "output_attentions": False, "output_hidden_states": False,
    "output_past": True, "pruned_heads": {}, "torchscript": False, "use_bfloat16": False, "finetuning_task": None,
}  # fmt: skip

BERT: Config = {
    "model_type": "bert", **BASE, **DROPOUT, "hidden_act": "gelu", "initializer_range": 0.02, "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512, "pad_token_id": 0, "type_vocab_size": 2, "vocab_size": 30522,
}  # fmt: skip
ROBERTA: Config = {
    "model_type": "roberta", **BASE, **DROPOUT, "bos_token_id": 0, "eos_token_id": 2, "hidden_act": "gelu",
    "initializer_range": 0.02, "layer_norm_eps": 1e-5, "max_position_embeddings": 514, "pad_token_id": 1,
    "type_vocab_size": 1, "vocab_size": 50265,
}  # fmt: skip
XLMR: Config = ROBERTA | {"model_type": "xlm-roberta", "vocab_size": 250002, "output_past": True}
CAMEMBERT: Config = ROBERTA | {
    "model_type": "camembert",
    "vocab_size": 32005,
    "output_past": True,
    "bos_token_id": 5,
    "eos_token_id": 6,
}
DISTIL: Config = {
    "model_type": "distilbert", "activation": "gelu", "attention_dropout": 0.1, "dim": 768, "dropout": 0.1,
    "hidden_dim": 3072, "initializer_range": 0.02, "max_position_embeddings": 512, "n_heads": 12, "n_layers": 6,
    "pad_token_id": 0, "qa_dropout": 0.1, "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False,
    "tie_weights_": True, "vocab_size": 30522,
}  # fmt: skip
ALBERT: Config = {
    "model_type": "albert", "attention_probs_dropout_prob": 0, "bos_token_id": 2, "classifier_dropout_prob": 0.1,
    "down_scale_factor": 1, "embedding_size": 128, "eos_token_id": 3, "gap_size": 0, "hidden_act": "gelu_new",
    "hidden_dropout_prob": 0, "initializer_range": 0.02, "inner_group_num": 1, "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512, "net_structure_type": 0, "num_hidden_groups": 1, "num_memory_blocks": 0,
    "pad_token_id": 0, "type_vocab_size": 2, "vocab_size": 30000, **BASE,
}  # fmt: skip
DEBERTA: Config = {
    "model_type": "deberta-v2", **BASE, **DROPOUT, "hidden_act": "gelu", "initializer_range": 0.02,
    "max_position_embeddings": 512, "relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm",
    "share_att_key": True, "pos_att_type": "p2c|c2p", "layer_norm_eps": 1e-7, "max_relative_positions": -1,
    "position_biased_input": False, "type_vocab_size": 0, "vocab_size": 128100,
}  # fmt: skip
# As transformers writes it after fine-tuning.
DEBERTA_TUNED: Config = DEBERTA | {
    "pos_att_type": ["p2c", "c2p"], "pooler_dropout": 0, "pooler_hidden_act": "gelu", "pooler_hidden_size": 768,
    "pad_token_id": 0, "torch_dtype": "float32", "transformers_version": "4.18.0",
}  # fmt: skip
DEBERTA_FIRST: Config = {
    "model_type": "deberta", **BASE, **DROPOUT, "attention_head_size": 64, "hidden_act": "gelu",
    "initializer_range": 0.02, "layer_norm_eps": 1e-7, "max_position_embeddings": 512, "max_relative_positions": -1,
    "padding_idx": 0, "pos_att_type": "c2p|p2c", "position_biased_input": False, "relative_attention": True,
    "type_vocab_size": 0, "vocab_size": 50265,
}  # fmt: skip
ELECTRA: Config = {
    "model_type": "electra", **BASE, **DROPOUT, "embedding_size": 768, "hidden_act": "gelu", "initializer_range": 0.02,
    "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "type_vocab_size": 2, "vocab_size": 30522,
}  # fmt: skip
# As transformers writes it after fine-tuning.
ELECTRA_TUNED: Config = ELECTRA | RECENT | {
    "pad_token_id": 0, "summary_activation": "gelu", "summary_last_dropout": 0.1, "summary_type": "first",
    "summary_use_proj": True, "torch_dtype": "float32",
}  # fmt: skip
MPNET: Config = {
    "model_type": "mpnet", **BASE, **DROPOUT, "bos_token_id": 0, "eos_token_id": 2, "hidden_act": "gelu",
    "initializer_range": 0.02, "layer_norm_eps": 1e-5, "max_position_embeddings": 514, "pad_token_id": 1,
    "relative_attention_num_buckets": 32, "vocab_size": 30527,
}  # fmt: skip
MODERNBERT: Config = {
    "model_type": "modernbert", **sizes(768, 22, 12, 1152), "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 50281, "classifier_activation": "gelu", "classifier_bias": False, "classifier_dropout": 0.0,
    "classifier_pooling": "mean", "cls_token_id": 50281, "decoder_bias": True, "deterministic_flash_attn": False,
    "embedding_dropout": 0.0, "eos_token_id": 50282, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0,
    "gradient_checkpointing": False, "hidden_activation": "gelu", "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02, "layer_norm_eps": 1e-5, "local_attention": 128, "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0, "norm_bias": False, "norm_eps": 1e-5,
    "pad_token_id": 50283, "position_embedding_type": "absolute", "sep_token_id": 50282, "tie_word_embeddings": True,
    "torch_dtype": "float32", "vocab_size": 50368,
}  # fmt: skip
EUROBERT: Config = {
    "model_type": "eurobert", **sizes(768, 12, 12, 3072), "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "modeling_eurobert.EuroBertModel"}, "bos_token": "<|begin_of_text|>",
    "bos_token_id": 128000, "clf_pooling": "late", "eos_token": "<|end_of_text|>", "eos_token_id": 128001,
    "head_dim": 64, "hidden_act": "silu", "hidden_dropout": 0.0, "initializer_range": 0.02, "mask_token": "<|mask|>",
    "mask_token_id": 128002, "max_position_embeddings": 8192, "mlp_bias": False, "num_key_value_heads": 12,
    "pad_token": "<|end_of_text|>", "pad_token_id": 128001, "pretraining_tp": 1, "rms_norm_eps": 1e-5,
    "rope_scaling": None, "rope_theta": 250000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": False, "vocab_size": 128256,
}  # fmt: skip
# Of proteins: <cls> 0, <pad> 1, <eos> 2, <mask> 32.
ESM: Config = {
    "model_type": "esm", **sizes(320, 6, 20, 1280), "architectures": ["EsmForMaskedLM"],
    "attention_probs_dropout_prob": 0.0, "classifier_dropout": None, "emb_layer_norm_before": False,
    "esmfold_config": None, "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "initializer_range": 0.02,
    "is_folding_model": False, "layer_norm_eps": 1e-5, "mask_token_id": 32, "max_position_embeddings": 1026,
    "pad_token_id": 1, "position_embedding_type": "rotary", "token_dropout": True, "torch_dtype": "float32",
    "use_cache": True, "vocab_list": None, "vocab_size": 33,
}  # fmt: skip
ERNIE: Config = {
    "model_type": "ernie", **BASE, **DROPOUT, "hidden_act": "gelu", "initializer_range": 0.02, "layer_norm_eps": 1e-5,
    "max_position_embeddings": 2048, "task_type_vocab_size": 3, "type_vocab_size": 4, "use_task_id": True,
    "vocab_size": 40000,
}  # fmt: skip
ROFORMER: Config = {
    "model_type": "roformer", **BASE, **DROPOUT, "embedding_size": 768, "hidden_act": "gelu", "initializer_range": 0.02,
    "layer_norm_eps": 1e-12, "max_position_embeddings": 1536, "pad_token_id": 0, "rotary_value": False,
    "type_vocab_size": 2, "vocab_size": 50000,
}  # fmt: skip
MINILM: Config = BERT | sizes(384, 6, 12, 1536) | {"gradient_checkpointing": False} | RECENT
IDENTITY = "torch.nn.modules.linear.Identity"
CROSS = {"sbert_ce_default_activation_function": IDENTITY}
CROSS_NEW = {"sentence_transformers": {"activation_fn": IDENTITY, "version": "4.1.0.dev0"}}
CONLL = labels("O", "B-MISC", "I-MISC", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC")
NLI = labels("entailment", "neutral", "contradiction")
NAME = "_name_or_path"

# name on the Hub -> (config.json, the head that it is for)
PUBLISHED: dict[str, tuple[Config, str]] = {
    # --- BERT ----------------------------------------------------------------------------------------
    "google-bert/bert-base-uncased": (BERT | RECENT | arch("BertForMaskedLM") | {"gradient_checkpointing": False, "transformers_version": "4.6.0.dev0"}, "mlm"),
    "google-bert/bert-base-cased": (BERT | RECENT | arch("BertForMaskedLM") | {"vocab_size": 28996, "gradient_checkpointing": False}, "mlm"),
    "google-bert/bert-large-uncased": (BERT | LARGE | RECENT | arch("BertForMaskedLM") | {"gradient_checkpointing": False}, "mlm"),
    "google-bert/bert-base-multilingual-cased": (BERT | FIRST_POOLER | arch("BertForMaskedLM") | {"vocab_size": 119547}, "mlm"),
    "google-bert/bert-base-chinese": (BERT | FIRST_POOLER | arch("BertForMaskedLM") | {"vocab_size": 21128}, "mlm"),
    "google-bert/bert-large-uncased-whole-word-masking-finetuned-squad": (BERT | LARGE | arch("BertForQuestionAnswering"), "qa"),
    "prajjwal1/bert-tiny": (
        {"hidden_size": 128, "hidden_act": "gelu", "initializer_range": 0.02, "vocab_size": 30522, "hidden_dropout_prob": 0.1,
         "num_attention_heads": 2, "type_vocab_size": 2, "max_position_embeddings": 512, "num_hidden_layers": 2,
         "intermediate_size": 512, "attention_probs_dropout_prob": 0.1, "model_type": "bert"}, "base",
    ),
    "allenai/scibert_scivocab_uncased": (
        {"attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768,
         "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 512, "num_attention_heads": 12,
         "num_hidden_layers": 12, "type_vocab_size": 2, "vocab_size": 31090, "model_type": "bert"}, "base",
    ),
    "emilyalsentzer/Bio_ClinicalBERT": (DROPOUT | BASE | {"hidden_act": "gelu", "initializer_range": 0.02, "max_position_embeddings": 512, "type_vocab_size": 2, "vocab_size": 28996, "model_type": "bert"}, "base"),
    "nlpaueb/legal-bert-base-uncased": (BERT | arch("BertForPreTraining") | {"bos_token_id": 0, "eos_token_ids": 0, "output_past": True}, "mlm"),
    "ProsusAI/finbert": (BERT | arch("BertForSequenceClassification") | labels("positive", "negative", "neutral") | {"gradient_checkpointing": False}, "seqcls"),
    "nlptown/bert-base-multilingual-uncased-sentiment": (BERT | FIRST_POOLER | arch("BertForSequenceClassification") | labels("1 star", "2 stars", "3 stars", "4 stars", "5 stars") | {"_num_labels": 5, "finetuning_task": "sentiment-analysis", "output_past": True, "vocab_size": 105879}, "seqcls"),
    "dslim/bert-base-NER": (BERT | arch("BertForTokenClassification") | CONLL | {"_num_labels": 9, "output_past": True, "vocab_size": 28996}, "tokcls"),
    "dslim/bert-large-NER": (BERT | LARGE | FIRST_POOLER | arch("BertForTokenClassification") | CONLL | {"_num_labels": 9, "output_past": True, "vocab_size": 28996}, "tokcls"),
    "dbmdz/bert-large-cased-finetuned-conll03-english": (BERT | LARGE | FIRST_POOLER | arch("BertForTokenClassification") | labels("O", "B-LOC", "B-MISC", "B-ORG", "I-LOC", "I-MISC", "I-ORG", "I-PER") | {"_num_labels": 9, "vocab_size": 28996} | {"id2label": {str(i): n for i, n in enumerate(["O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC"])}}, "tokcls"),
    "nateraw/bert-base-uncased-emotion": (BERT | RECENT | arch("BertForSequenceClassification") | labels("sadness", "joy", "love", "anger", "fear", "surprise") | {"gradient_checkpointing": False}, "seqcls"),
    "csarron/bert-base-uncased-squad-v1": (BERT | GENERATION | arch("BertForQuestionAnswering") | labels("LABEL_0", "LABEL_1"), "qa"),
    "sentence-transformers/all-MiniLM-L6-v2": (MINILM | arch("BertModel") | {NAME: "nreimers/MiniLM-L6-H384-uncased", "transformers_version": "4.8.2"}, "base"),
    "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2": (MINILM | arch("BertModel") | {"num_hidden_layers": 12, "vocab_size": 250037, NAME: "old_models/x"}, "base"),
    "BAAI/bge-small-en-v1.5": (BERT | sizes(384, 12, 12, 1536) | RECENT | arch("BertModel") | labels("LABEL_0") | {NAME: "/root/.cache/x", "torch_dtype": "float32"}, "base"),
    "BAAI/bge-base-en-v1.5": (BERT | RECENT | arch("BertModel") | labels("LABEL_0") | {"gradient_checkpointing": False, "torch_dtype": "float32"}, "base"),
    "BAAI/bge-large-zh-v1.5": (BERT | LARGE | FIRST_POOLER | RECENT | arch("BertModel") | labels("LABEL_0") | {"bos_token_id": 0, "eos_token_id": 2, "output_past": True, "vocab_size": 21128}, "base"),
    "intfloat/e5-base-v2": (BERT | RECENT | arch("BertModel") | {NAME: "tmp/", "torch_dtype": "float32", "transformers_version": "4.29.0.dev0"}, "base"),
    "thenlper/gte-base": (BERT | RECENT | arch("BertModel") | {"torch_dtype": "float16", "transformers_version": "4.28.1"}, "base"),
    "facebook/contriever": (BERT | RECENT | arch("Contriever") | {"torch_dtype": "float32", "transformers_version": "4.16.0.dev0"}, "base"),
    "colbert-ir/colbertv2.0": (BERT | RECENT | arch("HF_ColBERT") | {"gradient_checkpointing": False, "torch_dtype": "float32"}, "base"),
    "cross-encoder/ms-marco-MiniLM-L6-v2": (MINILM | arch("BertForSequenceClassification") | labels("LABEL_0") | CROSS_NEW, "seqcls"),
    "cross-encoder/ms-marco-MiniLM-L12-v2": (MINILM | {"num_hidden_layers": 12} | arch("BertForSequenceClassification") | labels("LABEL_0") | CROSS, "seqcls"),
    "cross-encoder/ms-marco-TinyBERT-L2-v2": (BERT | sizes(128, 2, 2, 512) | RECENT | arch("BertForSequenceClassification") | labels("LABEL_0") | CROSS_NEW, "seqcls"),
    "huawei-noah/TinyBERT_General_4L_312D": (
        {"attention_probs_dropout_prob": 0.1, "cell": {}, "model_type": "bert", "emb_size": 312, "hidden_act": "gelu",
         "hidden_dropout_prob": 0.1, "hidden_size": 312, "initializer_range": 0.02, "intermediate_size": 1200,
         "max_position_embeddings": 512, "num_attention_heads": 12, "num_hidden_layers": 4, "pre_trained": "", "structure": [],
         "type_vocab_size": 2, "vocab_size": 30522}, "base",
    ),
    "cointegrated/rubert-tiny2": (BERT | sizes(312, 3, 12, 600) | RECENT | arch("BertForPreTraining") | {"emb_size": 312, "gradient_checkpointing": False, "max_position_embeddings": 2048, "vocab_size": 83828, "torch_dtype": "float32"}, "mlm"),
    "kykim/bert-kor-base": (BERT | FIRST_POOLER | arch("BertForMaskedLM") | {"embedding_size": 768, "vocab_size": 42000}, "mlm"),
    "unitary/toxic-bert": (BERT | arch("BertForSequenceClassification") | labels("toxic", "severe_toxic", "obscene", "threat", "insult", "identity_hate") | {"problem_type": "multi_label_classification", "gradient_checkpointing": False}, "seqcls"),
    # --- RoBERTa -------------------------------------------------------------------------------------
    "FacebookAI/roberta-base": (ROBERTA | arch("RobertaForMaskedLM"), "mlm"),
    "FacebookAI/roberta-large": (ROBERTA | LARGE | arch("RobertaForMaskedLM"), "mlm"),
    "FacebookAI/roberta-large-mnli": (ROBERTA | LARGE | arch("RobertaForSequenceClassification") | labels("CONTRADICTION", "NEUTRAL", "ENTAILMENT") | {"_num_labels": 3}, "seqcls"),
    "cardiffnlp/twitter-roberta-base-sentiment-latest": (ROBERTA | RECENT | arch("RobertaForSequenceClassification") | labels("negative", "neutral", "positive") | {"gradient_checkpointing": False, "torch_dtype": "float32"}, "seqcls"),
    "SamLowe/roberta-base-go_emotions": (ROBERTA | RECENT | arch("RobertaForSequenceClassification") | labels(*(f"emotion {i}" for i in range(28))) | {"problem_type": "multi_label_classification", "torch_dtype": "float32"}, "seqcls"),
    "j-hartmann/emotion-english-distilroberta-base": (ROBERTA | {"num_hidden_layers": 6} | RECENT | arch("RobertaForSequenceClassification") | labels("anger", "disgust", "fear", "joy", "neutral", "sadness", "surprise") | {"problem_type": "single_label_classification", "gradient_checkpointing": False}, "seqcls"),
    "deepset/roberta-base-squad2": (ROBERTA | arch("RobertaForQuestionAnswering") | {"gradient_checkpointing": False, "language": "english", "name": "Roberta"}, "qa"),
    "Jean-Baptiste/roberta-large-ner-english": (ROBERTA | LARGE | RECENT | arch("RobertaForTokenClassification") | labels("O", "PER", "ORG", "LOC", "MISC") | {"torch_dtype": "float32"}, "tokcls"),
    "distilbert/distilroberta-base": (ROBERTA | {"num_hidden_layers": 6} | arch("RobertaForMaskedLM"), "mlm"),
    "sentence-transformers/all-distilroberta-v1": (ROBERTA | {"num_hidden_layers": 6} | RECENT | arch("RobertaForMaskedLM") | {"gradient_checkpointing": False}, "mlm"),
    "cross-encoder/stsb-roberta-large": (ROBERTA | LARGE | RECENT | arch("RobertaForSequenceClassification") | labels("LABEL_0") | {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid", "version": "4.0.1"}}, "seqcls"),
    "seyonec/ChemBERTa-zinc-base-v1": (ROBERTA | {"num_hidden_layers": 6, "vocab_size": 767} | arch("RobertaForMaskedLM"), "mlm"),
    "DeepChem/ChemBERTa-77M-MTR": (ROBERTA | sizes(384, 3, 12, 464) | RECENT | arch("RobertaForRegression") | {"is_gpu": True, "max_position_embeddings": 515, "norm_mean": [5.5, 2.0], "norm_std": [1.25, 0.5], "vocab_size": 600, "hidden_dropout_prob": 0.144, "attention_probs_dropout_prob": 0.109, "torch_dtype": "float32"}, "base"),
    "microsoft/codebert-base": (ROBERTA | arch("RobertaModel") | {"output_past": True}, "base"),
    "vinai/bertweet-base": (ROBERTA | arch("RobertaForMaskedLM") | {"max_position_embeddings": 130, "gradient_checkpointing": False, "tokenizer_class": "BertweetTokenizer", "vocab_size": 64001}, "mlm"),
    # --- XLM-RoBERTa ---------------------------------------------------------------------------------
    "FacebookAI/xlm-roberta-base": (XLMR | arch("XLMRobertaForMaskedLM"), "mlm"),
    "FacebookAI/xlm-roberta-large": (XLMR | LARGE | arch("XLMRobertaForMaskedLM"), "mlm"),
    "papluca/xlm-roberta-base-language-detection": (XLMR | RECENT | arch("XLMRobertaForSequenceClassification") | labels(*["ja", "nl", "ar", "pl", "de", "it", "pt", "tr", "es", "hi", "el", "ur", "bg", "en", "fr", "zh", "ru", "th", "sw", "vi"]) | {"problem_type": "single_label_classification", "torch_dtype": "float32"}, "seqcls"),
    "cardiffnlp/twitter-xlm-roberta-base-sentiment": (XLMR | arch("XLMRobertaForSequenceClassification") | labels("negative", "neutral", "positive") | {"gradient_checkpointing": False}, "seqcls"),
    "Davlan/xlm-roberta-base-ner-hrl": (XLMR | arch("XLMRobertaForTokenClassification") | CONLL | {"adapters": {"adapters": {}, "config_map": {}}, "gradient_checkpointing": False}, "tokcls"),
    "joeddav/xlm-roberta-large-xnli": (XLMR | LARGE | arch("XLMRobertaForSequenceClassification") | labels("contradiction", "neutral", "entailment") | {"_num_labels": 3}, "seqcls"),
    "Davlan/xlm-roberta-large-ner-hrl": (XLMR | LARGE | arch("XLMRobertaForTokenClassification") | CONLL | {"gradient_checkpointing": False}, "tokcls"),
    "deepset/xlm-roberta-large-squad2": (XLMR | LARGE | arch("XLMRobertaForQuestionAnswering") | {"gradient_checkpointing": False, "language": "english", "name": "XLMRoberta"}, "qa"),
    "intfloat/multilingual-e5-base": (XLMR | RECENT | arch("XLMRobertaModel") | {"torch_dtype": "float32"}, "base"),
    "BAAI/bge-m3": (XLMR | LARGE | RECENT | arch("XLMRobertaModel") | {NAME: "", "max_position_embeddings": 8194, "torch_dtype": "float32"}, "base"),
    "BAAI/bge-reranker-v2-m3": (XLMR | LARGE | RECENT | arch("XLMRobertaForSequenceClassification") | labels("LABEL_0") | {"max_position_embeddings": 8194, "torch_dtype": "float32"}, "seqcls"),
    "BAAI/bge-reranker-base": (XLMR | RECENT | arch("XLMRobertaForSequenceClassification") | labels("LABEL_0") | {"torch_dtype": "float32"}, "seqcls"),
    # --- CamemBERT -----------------------------------------------------------------------------------
    "almanach/camembert-base": (CAMEMBERT | arch("CamembertForMaskedLM"), "mlm"),
    "Jean-Baptiste/camembert-ner": (CAMEMBERT | arch("CamembertForTokenClassification") | labels("O", "LOC", "PER", "MISC", "ORG") | {"gradient_checkpointing": False}, "tokcls"),
    # --- DistilBERT ----------------------------------------------------------------------------------
    "distilbert/distilbert-base-uncased": (DISTIL | arch("DistilBertForMaskedLM"), "mlm"),
    "distilbert/distilbert-base-multilingual-cased": (DISTIL | arch("DistilBertForMaskedLM") | {"output_past": True, "vocab_size": 119547}, "mlm"),
    "distilbert/distilbert-base-uncased-finetuned-sst-2-english": (DISTIL | arch("DistilBertForSequenceClassification") | labels("NEGATIVE", "POSITIVE") | {"finetuning_task": "sst-2", "output_past": True}, "seqcls"),
    "distilbert/distilbert-base-cased-distilled-squad": (DISTIL | arch("DistilBertForQuestionAnswering") | {"output_past": True, "vocab_size": 28996}, "qa"),
    "lxyuan/distilbert-base-multilingual-cased-sentiments-student": (DISTIL | arch("DistilBertForSequenceClassification") | labels("positive", "neutral", "negative") | {"output_past": True, "torch_dtype": "float32", "vocab_size": 119547}, "seqcls"),
    "dslim/distilbert-NER": (DISTIL | arch("DistilBertForTokenClassification") | CONLL | {"output_past": True, "torch_dtype": "float32", "vocab_size": 28996}, "tokcls"),
    "sentence-transformers/msmarco-distilbert-base-v4": (DISTIL | arch("DistilBertModel"), "base"),
    # --- ALBERT --------------------------------------------------------------------------------------
    "albert/albert-base-v2": (ALBERT | arch("AlbertForMaskedLM"), "mlm"),
    "albert/albert-xxlarge-v2": (ALBERT | sizes(4096, 12, 64, 16384) | arch("AlbertForMaskedLM") | {"layers_to_keep": [], "hidden_act": "gelu"}, "mlm"),
    "textattack/albert-base-v2-imdb": (ALBERT | GENERATION | arch("AlbertForSequenceClassification") | {"bos_token_id": 2, "eos_token_id": 3, "finetuning_task": "imdb"}, "seqcls"),
    "bhadresh-savani/albert-base-v2-emotion": (ALBERT | arch("AlbertForSequenceClassification") | labels("sadness", "joy", "love", "anger", "fear", "surprise") | {"problem_type": "single_label_classification", "position_embedding_type": "absolute"}, "seqcls"),
    "ArBert/albert-base-v2-finetuned-ner": (ALBERT | arch("AlbertForTokenClassification") | CONLL | {"position_embedding_type": "absolute", "torch_dtype": "float32"}, "tokcls"),
    "twmkn9/albert-base-v2-squad2": (ALBERT | GENERATION | arch("AlbertForQuestionAnswering") | {"bos_token_id": 2, "eos_token_id": 3}, "qa"),
    "sentence-transformers/paraphrase-albert-small-v2": (ALBERT | {"num_hidden_layers": 6} | arch("AlbertModel") | {"gradient_checkpointing": False, "position_embedding_type": "absolute"}, "base"),
    # --- DeBERTa -------------------------------------------------------------------------------------
    "microsoft/deberta-v3-base": (DEBERTA, "base"),
    "microsoft/deberta-v3-small": (DEBERTA | {"num_hidden_layers": 6}, "base"),
    "microsoft/deberta-v2-xlarge": (DEBERTA | sizes(1536, 24, 24, 6144) | {"attention_head_size": 64, "conv_act": "gelu", "conv_kernel_size": 3}, "base"),
    "microsoft/mdeberta-v3-base": (DEBERTA | {"vocab_size": 251000}, "base"),
    "MoritzLaurer/DeBERTa-v3-base-mnli-fever-anli": (DEBERTA_TUNED | arch("DebertaV2ForSequenceClassification") | NLI, "seqcls"),
    "MoritzLaurer/mDeBERTa-v3-base-mnli-xnli": (DEBERTA_TUNED | arch("DebertaV2ForSequenceClassification") | NLI | {"vocab_size": 251000}, "seqcls"),
    "cross-encoder/nli-deberta-v3-base": (DEBERTA_TUNED | arch("DebertaV2ForSequenceClassification") | labels("contradiction", "entailment", "neutral") | CROSS, "seqcls"),
    "sileod/deberta-v3-base-tasksource-nli": (DEBERTA_TUNED | arch("DebertaV2ForSequenceClassification") | NLI | {"classifiers_size": [3, 2, 2], "tasks": ["glue/mnli", "glue/qnli", "glue/rte"], "padding": True, "legacy": True}, "seqcls"),
    "protectai/deberta-v3-base-prompt-injection-v2": (DEBERTA_TUNED | arch("DebertaV2ForSequenceClassification") | labels("SAFE", "INJECTION") | {"problem_type": "single_label_classification"}, "seqcls"),
    "deepset/deberta-v3-base-squad2": (DEBERTA_TUNED | arch("DebertaV2ForQuestionAnswering") | {"summary_type": "first"}, "qa"),
    "microsoft/deberta-base": (DEBERTA_FIRST, "base"),
    "microsoft/deberta-base-mnli": (DEBERTA_FIRST | arch("DebertaForSequenceClassification") | labels("CONTRADICTION", "NEUTRAL", "ENTAILMENT"), "seqcls"),
    # --- ELECTRA -------------------------------------------------------------------------------------
    "google/electra-base-discriminator": (ELECTRA | arch("ElectraForPreTraining"), "replaced"),
    "google/electra-small-discriminator": (ELECTRA | sizes(256, 12, 4, 1024) | arch("ElectraForPreTraining") | {"embedding_size": 128}, "replaced"),
    "google/electra-small-generator": (ELECTRA | sizes(256, 12, 4, 1024) | arch("ElectraForMaskedLM") | {"embedding_size": 128}, "mlm"),
    "deepset/electra-base-squad2": (ELECTRA_TUNED | arch("ElectraForQuestionAnswering"), "qa"),
    "cross-encoder/ms-marco-electra-base": (ELECTRA_TUNED | arch("ElectraForSequenceClassification") | labels("LABEL_0") | CROSS, "seqcls"),
    # --- MPNet ---------------------------------------------------------------------------------------
    "microsoft/mpnet-base": (MPNET | arch("MPNetForMaskedLM"), "mlm"),
    "sentence-transformers/all-mpnet-base-v2": (MPNET | arch("MPNetForMaskedLM") | {NAME: "old_models/x", "torch_dtype": "float32"}, "mlm"),
    "sentence-transformers/multi-qa-mpnet-base-dot-v1": (MPNET | arch("MPNetForMaskedLM") | {"torch_dtype": "float32"}, "mlm"),
    "sentence-transformers/paraphrase-mpnet-base-v2": (MPNET | arch("MPNetModel") | {NAME: "old_models/x", "gradient_checkpointing": False}, "base"),
    # --- ModernBERT ----------------------------------------------------------------------------------
    "answerdotai/ModernBERT-base": (MODERNBERT | arch("ModernBertForMaskedLM"), "mlm"),
    "answerdotai/ModernBERT-large": (MODERNBERT | sizes(1024, 28, 16, 2624) | arch("ModernBertForMaskedLM"), "mlm"),
    "Alibaba-NLP/gte-modernbert-base": (MODERNBERT | arch("ModernBertModel") | {"reference_compile": False, "sparse_pred_ignore_index": -100, "sparse_prediction": False, "torch_dtype": "float16"}, "base"),
    "Alibaba-NLP/gte-reranker-modernbert-base": (MODERNBERT | arch("ModernBertForSequenceClassification") | labels("LABEL_0") | {"sparse_pred_ignore_index": -100, "sparse_prediction": False, "torch_dtype": "float16"}, "seqcls"),
    "ibm-granite/granite-embedding-english-r2": (MODERNBERT | arch("ModernBertModel") | {"global_rope_theta": 80000.0, "repad_logits_with_grad": False}, "base"),
    "jhu-clsp/mmBERT-base": (MODERNBERT | arch("ModernBertForMaskedLM") | {"bos_token_id": 2, "cls_token_id": 1, "eos_token_id": 1, "local_rope_theta": 160000.0, "mask_token_id": 4, "pad_token_id": 0, "sep_token_id": 1, "vocab_size": 256000}, "mlm"),
    # --- EuroBERT ------------------------------------------------------------------------------------
    "EuroBERT/EuroBERT-210m": (EUROBERT | arch("EuroBertForMaskedLM"), "mlm"),
    "EuroBERT/EuroBERT-610m": (EUROBERT | sizes(1152, 26, 18, 4096) | {"num_key_value_heads": 6} | arch("EuroBertForMaskedLM"), "mlm"),
    # --- RoBERTa's relatives -------------------------------------------------------------------------
    "facebook/xlm-roberta-xl": (XLMR | sizes(2560, 36, 32, 10240) | arch("XLMRobertaXLForMaskedLM") | {"model_type": "xlm-roberta-xl", "vocab_size": 250880, "position_embedding_type": "absolute", "use_cache": True}, "mlm"),
    "facebook/xlm-roberta-xxl": (XLMR | sizes(4096, 48, 32, 16384) | arch("XLMRobertaXLForMaskedLM") | {"model_type": "xlm-roberta-xl", "vocab_size": 250880, "position_embedding_type": "absolute", "use_cache": True}, "mlm"),
    "andreasmadsen/efficient_mlm_m0.40": (ROBERTA | LARGE | RECENT | arch("RobertaPreLayerNormForMaskedLM") | {"model_type": "roberta-prelayernorm", "torch_dtype": "float32"}, "mlm"),
    "facebook/data2vec-text-base": (ROBERTA | RECENT | arch("Data2VecTextModel") | {"model_type": "data2vec-text", "torch_dtype": "float32"}, "base"),
    # --- ESM -----------------------------------------------------------------------------------------
    "facebook/esm2_t6_8M_UR50D": (ESM, "mlm"),
    "facebook/esm2_t33_650M_UR50D": (ESM | sizes(1280, 33, 20, 5120), "mlm"),
    "facebook/esm1b_t33_650M_UR50S": (ESM | sizes(1280, 33, 20, 5120) | {"emb_layer_norm_before": True, "position_embedding_type": "absolute", "token_dropout": True}, "mlm"),
    "blaze999/Medical-NER": (DEBERTA_TUNED | arch("DebertaV2ForTokenClassification") | labels(*(f"B-{i}" for i in range(83))), "tokcls"),
}  # fmt: skip

# Other models under these families' names, and the key by which they are told.
ZEROSHOT = labels("entailment", "not_entailment")
# Their files were not at hand: sizes, classes and labels as they are known, without the odd keys that files have.
FURTHER: dict[str, tuple[Config, str]] = {
    "mixedbread-ai/mxbai-embed-large-v1": (BERT | LARGE | RECENT | arch("BertModel") | {"torch_dtype": "float16", "use_cache": False}, "base"),
    "mixedbread-ai/mxbai-rerank-base-v1": (DEBERTA_TUNED | arch("DebertaV2ForSequenceClassification") | labels("LABEL_0"), "seqcls"),
    "Snowflake/snowflake-arctic-embed-xs": (MINILM | arch("BertModel"), "base"),
    "Snowflake/snowflake-arctic-embed-m": (BERT | RECENT | arch("BertModel") | {"torch_dtype": "float32"}, "base"),
    "Snowflake/snowflake-arctic-embed-m-v1.5": (BERT | RECENT | arch("BertModel") | {"torch_dtype": "float32"}, "base"),
    "Snowflake/snowflake-arctic-embed-l-v2.0": (XLMR | LARGE | RECENT | arch("XLMRobertaModel") | {"max_position_embeddings": 8194, "torch_dtype": "float32"}, "base"),
    "intfloat/e5-small-v2": (MINILM | RECENT | arch("BertModel") | {"num_hidden_layers": 12}, "base"),
    "intfloat/e5-large-v2": (BERT | LARGE | RECENT | arch("BertModel"), "base"),
    "intfloat/multilingual-e5-small": (MINILM | RECENT | arch("BertModel") | {"num_hidden_layers": 12, "vocab_size": 250037, "tokenizer_class": "XLMRobertaTokenizer"}, "base"),
    "intfloat/multilingual-e5-large": (XLMR | LARGE | RECENT | arch("XLMRobertaModel") | {"torch_dtype": "float32"}, "base"),
    "intfloat/multilingual-e5-large-instruct": (XLMR | LARGE | RECENT | arch("XLMRobertaModel") | {"torch_dtype": "float16"}, "base"),
    "naver/splade-cocondenser-ensembledistil": (BERT | RECENT | arch("BertForMaskedLM"), "mlm"),
    "naver/splade-v3": (BERT | RECENT | arch("BertForMaskedLM"), "mlm"),
    "prithivida/Splade_PP_en_v1": (BERT | RECENT | arch("BertForMaskedLM"), "mlm"),
    "opensearch-project/opensearch-neural-sparse-encoding-v2-distill": (DISTIL | arch("DistilBertForMaskedLM"), "mlm"),
    "answerdotai/answerai-colbert-small-v1": (MINILM | RECENT | arch("HF_ColBERT") | {"num_hidden_layers": 12}, "base"),
    "cross-encoder/ms-marco-MiniLM-L4-v2": (MINILM | {"num_hidden_layers": 4} | arch("BertForSequenceClassification") | labels("LABEL_0") | CROSS, "seqcls"),
    "MoritzLaurer/deberta-v3-large-zeroshot-v2.0": (DEBERTA_TUNED | LARGE | {"pooler_hidden_size": 1024} | arch("DebertaV2ForSequenceClassification") | ZEROSHOT, "seqcls"),
    "MoritzLaurer/deberta-v3-base-zeroshot-v1.1-all-33": (DEBERTA_TUNED | arch("DebertaV2ForSequenceClassification") | ZEROSHOT, "seqcls"),
    "MoritzLaurer/ModernBERT-large-zeroshot-v2.0": (MODERNBERT | sizes(1024, 28, 16, 2624) | arch("ModernBertForSequenceClassification") | ZEROSHOT, "seqcls"),
    "nomic-ai/modernbert-embed-base": (MODERNBERT | arch("ModernBertModel"), "base"),
    "jhu-clsp/ettin-encoder-150m": (MODERNBERT | arch("ModernBertForMaskedLM"), "mlm"),
    "tomaarsen/reranker-ModernBERT-base-gooaq-bce": (MODERNBERT | arch("ModernBertForSequenceClassification") | labels("LABEL_0") | {"classifier_pooling": "mean"}, "seqcls"),
    "EuroBERT/EuroBERT-2.1B": (EUROBERT | sizes(2304, 32, 18, 6144) | {"num_key_value_heads": 6, "head_dim": 128} | arch("EuroBertForMaskedLM"), "mlm"),
    "nghuyong/ernie-3.0-base-zh": (ERNIE | arch("ErnieForMaskedLM"), "mlm"),
    "nghuyong/ernie-2.0-base-en": (ERNIE | arch("ErnieModel") | {"max_position_embeddings": 512, "type_vocab_size": 4, "vocab_size": 30522}, "base"),
    "junnyu/roformer_chinese_base": (ROFORMER | arch("RoFormerForMaskedLM"), "mlm"),
    "junnyu/roformer_chinese_char_small": (ROFORMER | sizes(384, 6, 6, 1536) | arch("RoFormerForMaskedLM") | {"embedding_size": 384, "max_position_embeddings": 512, "tokenizer_class": "BertTokenizer", "vocab_size": 12000}, "mlm"),
    "facebook/esm2_t12_35M_UR50D": (ESM | sizes(480, 12, 20, 1920), "mlm"),
    "facebook/esm2_t30_150M_UR50D": (ESM | sizes(640, 30, 20, 2560), "mlm"),
    "facebook/esm2_t36_3B_UR50D": (ESM | sizes(2560, 36, 40, 10240), "mlm"),
}  # fmt: skip

REFUSED: dict[str, tuple[Config, str]] = {
    "zhihan1996/DNABERT-2-117M": (BERT | arch("BertForMaskedLM") | {"alibi_starting_size": 512, "attention_probs_dropout_prob": 0.0, "auto_map": {"AutoModel": "bert_layers.BertModel"}, "vocab_size": 4096}, "alibi_starting_size"),
}  # fmt: skip


def shrunk(config: Config, rows: Sequence[tuple[str, int]]) -> Config:
    """Return a configuration with tiny sizes and everything else as it is; ``rows`` are keys with their sizes."""
    small = dict(config)
    for key, value in rows:
        if key in small:
            small[key] = value
    return small
