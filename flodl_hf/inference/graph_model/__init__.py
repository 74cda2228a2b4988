"""A graph with what belongs to it: what adapters, the runtime and saving know of a model.

model          graph, configuration, tokenizer, source; a call with Hugging Face's tensors becomes a call of the graph
hidden_states  what one call goes through: states, attention weights, embeddings in place of ids
index_checks   what a call says of indices outside of the model's tables
routed         encoders of routes beside that of the usual route
after_fork     a process that was forked after models ran in it
"""
