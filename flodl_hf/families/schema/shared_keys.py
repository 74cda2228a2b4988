"""Keys of ``config.json`` with the same meaning in every family: without effect, or of another architecture.

Only tables; `flodl_hf.families.schema.config_rows` applies them. The file of a family lists its own keys.
"""

from __future__ import annotations

from flodl_hf.families.schema.config_rows import Foreign, Inert

__all__ = ["COMMON_INERT", "FOREIGN", "HEAD_WIDTH"]

_CODE = "names code in the repository, which is never run"
_ATTENTION = "chooses kernels, not numbers; here it is the argument attention="
_WIDTH = "the width of the states, which the tensors show"
_DECODER = "only decoders that look at an encoder read it"
_GENERATION = "a text generation setting; encoders do not generate"
_OUTPUT = "selects the outputs of a call in transformers; here it is an argument of the call"

# For families with a ``head_dim`` that transformers' model reads.
HEAD_WIDTH = Inert("head_dim", "heads of another width are not supported", repeats="head_width", read=True)

COMMON_INERT: tuple[Inert, ...] = (
    Inert("transformers_version", "records who wrote the file"),
    Inert("architectures", "read by the dispatch"),
    Inert("model_type", "read by the dispatch"),
    Inert("transformers_weights", "names the file of the weights, where it has another name"),
    Inert("auto_map", _CODE, said=True),
    Inert("custom_pipelines", _CODE),
    Inert("attn_implementation", _ATTENTION, said=True),
    Inert("_attn_implementation", _ATTENTION, said=True),
    Inert("_attn_implementation_autoset", _ATTENTION),
    Inert("sentence_transformers", "a cross-encoder's notes; `rerank` obeys its activation"),
    Inert("sbert_ce_default_activation_function", "a cross-encoder's activation, which `rerank` obeys"),
    Inert("label_thresholds", "tuned thresholds, which predict(threshold='tuned') uses"),
    Inert("tie_weights_", "an old name of tie_word_embeddings"),
    Inert("eos_token_ids", "an old list of eos_token_id; the tokenizer places special tokens"),
    Inert("pad_token_ids", "an old list of pad_token_id"),
    Inert("embedding_size", _WIDTH, repeats="hidden_size", said=True),
    Inert("emb_size", _WIDTH, repeats="hidden_size", said=True),
    Inert("embedding_dim", _WIDTH, repeats="hidden_size", said=True),
    Inert("emb_dim", _WIDTH, repeats="hidden_size", said=True),
    Inert("num_key_value_heads", "heads do not share keys and values", repeats="num_heads"),
    Inert("head_dim", "a head is as wide as states are by heads", repeats="head_width"),
    Inert("attention_head_size", "a head is as wide as states are by heads", repeats="head_width"),
    Inert("padding", "an option of tokenizing"),
    Inert("truncation", "an option of tokenizing"),
    Inert("classifiers_size", "label counts of several tasks; the other heads are not in the file"),
    Inert("tasks", "names of the tasks of a training of several"),
    Inert("is_gpu", "where the training ran"),
    Inert("norm_mean", "how training labels were scaled; outputs are not scaled back, here or in transformers"),
    Inert("norm_std", "how training labels were scaled; outputs are not scaled back, here or in transformers"),
    Inert("cell", "a note of the search that found the architecture"),
    Inert("structure", "a note of the search that found the architecture"),
    Inert("pre_trained", "a note of the training script"),
    Inert("training", "a note of the training script"),
    Inert("tie_last_hidden_states", _OUTPUT),
    Inert("torch_dtype", "the dtype of the weights where dtype is absent"),
    Inert("dtype", "the dtype of the weights, unless the caller selects another; the load report lists it"),
    Inert("initializer_range", "only used when a new head is made", None),
    Inert("initializer_factor", "only used for new weights"),
    Inert("finetuning_task", "a note of the training script"),
    Inert("task_specific_params", "settings of other tasks"),
    Inert("language", "a note"),
    Inert("name", "a note"),
    Inert("tokenizer_class", "the tokenizer is built from its own files"),
    Inert("bos_token_id", "the tokenizer places special tokens"),
    Inert("eos_token_id", "the tokenizer places special tokens"),
    Inert("sep_token_id", "the tokenizer places special tokens"),
    Inert("cls_token_id", "the tokenizer places special tokens"),
    Inert("mask_token_id", "the tokenizer knows its mask token"),
    Inert("decoder_start_token_id", _GENERATION),
    Inert("gradient_checkpointing", "a training option"),
    Inert("use_cache", "a cache of decoders"),
    Inert("use_return_dict", _OUTPUT),
    Inert("return_dict", _OUTPUT, said=True, usual=True),
    Inert("output_past", _OUTPUT),
    Inert("output_attentions", _OUTPUT, said=True),
    Inert("output_hidden_states", _OUTPUT, said=True),
    Inert("torchscript", "an export option"),
    Inert(
        "pruned_heads",
        "transformers prunes no heads since its version 5; tensors without them would not fit",
        said=True,
    ),
    Inert("use_bfloat16", "an option of TPU training"),
    Inert("chunk_size_feed_forward", "trades memory for time and changes no number"),
    Inert(
        "position_embedding_type",
        "only learned absolute positions exist in these families",
        ("absolute", None),
    ),
    Inert("is_decoder", "these are encoders", (False, None)),
    Inert("is_encoder_decoder", "a note of the encoder-decoder that the encoder was extracted from", said=True),
    Inert("add_cross_attention", "these are encoders", (False, None)),
    Inert("cross_attention_hidden_size", _DECODER),
    Inert("tie_encoder_decoder", _DECODER),
    Inert("quantization_config", "quantised weights are not supported", (None, {})),
    *(
        Inert(f"summary_{word}", "ELECTRA's multiple choice alone reads it")
        for word in ("type", "use_proj", "activation", "last_dropout")
    ),
    Inert("num_choices", "multiple choice counts the choices that it is given"),
    Inert("type_vocab_size", "this family has no token types, and a file with some would not fit"),
    Inert("directionality", "a note of the first BERT release, which no code reads"),
    Inert("pooler_fc_size", "a note of the first BERT release; the pooler is hidden_size wide"),
    Inert("pooler_num_attention_heads", "a note of the first BERT release"),
    Inert("pooler_num_fc_layers", "a note of the first BERT release"),
    Inert("pooler_size_per_head", "a note of the first BERT release"),
    Inert("pooler_type", "a note of the first BERT release"),
    Inert("flodl_source_repo", "a note of an earlier export"),
    *(
        Inert(key, _GENERATION)
        for key in (
            "bad_words_ids",
            "begin_suppress_tokens",
            "diversity_penalty",
            "do_sample",
            "early_stopping",
            "encoder_no_repeat_ngram_size",
            "exponential_decay_length_penalty",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "length_penalty",
            "max_length",
            "min_length",
            "no_repeat_ngram_size",
            "num_beam_groups",
            "num_beams",
            "num_return_sequences",
            "output_scores",
            "prefix",
            "remove_invalid_values",
            "repetition_penalty",
            "return_dict_in_generate",
            "suppress_tokens",
            "temperature",
            "tf_legacy_loss",
            "top_k",
            "top_p",
            "typical_p",
        )
    ),
)

# Switched on, each of these makes another model of the one that `model_type` names.
FOREIGN: tuple[Foreign, ...] = (
    Foreign("alibi_starting_size", "attention is biased by distance (ALiBi) instead of learned positions"),
    Foreign("alibi", "attention is biased by distance (ALiBi) instead of learned positions"),
    Foreign("use_alibi", "attention is biased by distance (ALiBi) instead of learned positions"),
    Foreign("attention_window", "attention sees a window only, as in Longformer"),
    Foreign("local_attention", "attention sees a window only"),
    Foreign("sliding_window", "attention sees a window only"),
    Foreign("block_size", "attention is sparse by blocks, as in BigBird"),
    Foreign("rope_theta", "positions are rotations of queries and keys"),
    Foreign("rope_scaling", "positions are rotations of queries and keys"),
    Foreign("rope_parameters", "positions are rotations of queries and keys"),
    Foreign("rotary_base", "positions are rotations of queries and keys"),
    Foreign("rotary_emb_base", "positions are rotations of queries and keys"),
    Foreign("rotary_emb_fraction", "positions are rotations of queries and keys"),
    Foreign("rotary_value", "positions are rotations of queries, keys and values"),
    Foreign("feed_forward_type", "the feed-forward part is another, perhaps gated"),
    Foreign("hidden_act_gated", "the feed-forward part is gated"),
    Foreign("use_glu", "the feed-forward part is gated"),
    Foreign("num_experts", "the feed-forward part is a mixture of experts"),
    Foreign("moe_num_experts", "the feed-forward part is a mixture of experts"),
    Foreign("prenorm", "layers normalise before they compute"),
    Foreign("pre_norm", "layers normalise before they compute"),
    Foreign("use_rms_norm", "norms are without mean and bias"),
    Foreign("per_layer_config", "layers differ from one another"),
    Foreign("layer_types", "layers differ from one another"),
    Foreign("emb_pooler", "the embedding is made by code of the repository"),
    Foreign("lora_adaptations", "adapters change the weights, chosen by task"),
    Foreign("adapters", "adapters change what layers compute"),
    Foreign("lora", "adapters change the weights"),
    Foreign("lora_config", "adapters change the weights"),
    Foreign("peft_config", "adapters change the weights"),
    Foreign("adapter_config", "adapters change the weights"),
    Foreign("compression_config", "weights are stored as codes"),
    Foreign("quantization", "weights are stored as codes"),
    Foreign("prefix_projection", "learned prefixes join every layer's keys and values"),
    Foreign("pre_seq_len", "learned prefixes join every layer's keys and values"),
)
