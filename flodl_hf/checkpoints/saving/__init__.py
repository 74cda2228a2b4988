"""Write the files of a checkpoint folder; `flodl_hf.models.saving` decides which ones a model needs.

state           which tensors under which names, in which order and files
write           safetensors bytes, hashed on the way
json_text       a JSON text with some values changed
sentence_files  what folders of sentence-transformers have besides
publish         a folder put in place in one step
"""
