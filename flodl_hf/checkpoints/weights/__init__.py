"""Weights in a folder's files, and which of them a model's parameters are. `flodl_hf.models.pretrained` leads through.

checkpoint   a folder of weights, opened and checked
pickle_free  ``pytorch_model.bin``, read without executing it
loading      which stored tensor is which of ours, decided from headers
on_disk      weights that stay in their files
early        what is begun while torch is imported
file_names   what the files of a folder are called
source       what a model was read from, kept with it
process_exit the end of a process without a last garbage collection
checksums    what a folder says its files are
"""
