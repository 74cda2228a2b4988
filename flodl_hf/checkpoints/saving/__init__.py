"""Write the files of a checkpoint folder; `flodl_hf.models.saving` decides which ones a model needs.

state      safetensors files: names, order, shards and bytes
publish    a folder put in place in one step
"""
