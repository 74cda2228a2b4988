"""Layers with an adapter. `flodl_hf.models.adapters` creates, reads and writes adapters.

projections  products with a low-rank part or learned scales, one or several, joined or folded into the weight
tables       embedding tables with a low-rank sum or separate rows
prompts      virtual tokens before the tokens of each row
module_replacement  modules that replace others and share their parameters
"""
