"""Folders of checkpoints: their configuration, weights and further files, read and written.

config    ``config.json``
weights   safetensors and ``.bin`` files, and the names of their tensors
sentence  folders of sentence-transformers
saving    write files, and publish them in one step
keywords  keywords of other libraries: mapped to ours, ignored, or refused with the reason
folders   names and paths, and safe access to the files of a folder
system    functions of operating systems, and the version
hub       download from and upload to the Hugging Face Hub
"""
