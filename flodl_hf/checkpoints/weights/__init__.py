"""Weight files of a folder, matched with a model's parameters; used through `flodl_hf.models.pretrained`.

checkpoint   open and check a folder of weights
restricted_unpickler  read ``pytorch_model.bin`` without executing it
loading      match stored tensors with parameters, from headers alone
on_disk      weights that stay in their files
prefetch     bytes read by several threads, also while torch is imported
file_names   file names of a model folder
checksums    expected checksums of a folder's files
"""
