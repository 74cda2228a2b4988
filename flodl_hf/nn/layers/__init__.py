"""Parts of a layer other than attention.

encoder_layer  the one layer of all families: its computation and order
table          how its operations are computed: the reference arithmetic, which other tables override
activations    the functions that ``hidden_act`` may name
norms          layer norms with other arithmetic than torch
parts          tensors of a file that contain several of ours, and products by them
"""
