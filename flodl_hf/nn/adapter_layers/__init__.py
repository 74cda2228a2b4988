"""Layers with an adapter. `flodl_hf.models.adapters` creates, reads and writes adapters.

lora      products with a low-rank part, one or several, joined or folded into the weight
scaled    results times learned scales (IA3)
prompts   virtual tokens before the tokens of each row
module_replacement  modules that replace others and share their parameters
"""
