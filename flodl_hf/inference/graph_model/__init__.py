"""A graph with what belongs to it: what adapters, the runtime and saving know of a model.

model          graph, configuration, tokenizer, source; a call with Hugging Face's tensors becomes a call of the graph
hidden_states  collect the intermediate values of one call: states, attention weights; embeddings instead of ids
routed         encoders of routes other than the default route
"""
