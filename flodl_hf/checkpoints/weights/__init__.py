"""Weight files of a folder, matched with a model's parameters; used through `flodl_hf.models.pretrained`.

checkpoint     open and check a folder of weights
manifest       headers and bytes of one safetensors file, and the index of several
torch_file     read ``pytorch_model.bin`` without executing it, with torch_program
loading        match stored tensors with parameters, from headers alone
loaded         report and source of a loaded model, and weights that stay in their files
prefetch       bytes read by several threads, also while torch is imported
checksums      expected checksums of a folder's files
"""
