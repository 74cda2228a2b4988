"""Layers with an adapter: what they compute. `flodl_hf.models.adapters` asks for adapters, reads and writes them.

lora      products with a low-rank part, one or several, joined or folded into the weight
scaled    results times learned scales (IA3)
prompts   virtual tokens before those of each row
stand_in  modules in the place of others, with their parameters
"""
