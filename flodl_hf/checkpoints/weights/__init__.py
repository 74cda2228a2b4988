"""Weight files of a folder, matched with a model's parameters; used through `flodl_hf.models.pretrained`.

checkpoint   open and check a folder of weights
restricted_unpickler  read ``pytorch_model.bin`` without executing it
loading      match stored tensors with parameters, from headers alone
on_disk      weights that stay in their files
prefetch        work that starts while torch is imported
file_names   file names of a model folder
source       source of a loaded model, stored with it
process_exit the end of a process without a last garbage collection
checksums    expected checksums of a folder's files
"""
