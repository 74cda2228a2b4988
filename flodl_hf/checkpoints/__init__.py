"""Folders of checkpoints: their configuration, weights and further files, read and written.

config    ``config.json``
weights   safetensors and ``.bin`` files, and the names of their tensors
sentence  folders of sentence-transformers
saving    files written, and put in place at once
system    functions of operating systems
hub       folders from and to the Hugging Face Hub
"""
