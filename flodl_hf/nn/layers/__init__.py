"""What a layer consists of, below attention and encoders.

encoder_layer  the one layer of all families: what is computed, in which order
table          how its operations are computed: the reference arithmetic, which other tables override
activations    the functions that ``hidden_act`` may name
norms          layer norms whose reference computes them otherwise than torch
parts          tensors of a file that hold several of ours, and products by them
"""
