"""Layers, attention and kernels: what models compute with, on tensors alone.

layout          how tokens are arranged: padded and packed
layers          the encoder layer, its operations, activations, norms
attention       attention for each layout, rotary and relative positions
encoder         embeddings, stacks, poolers and task heads as graphs; losses
adapter_layers  layers with an adapter
backends        how the operations of a layer run on a CPU and on CUDA
kernels         Triton kernels
"""
