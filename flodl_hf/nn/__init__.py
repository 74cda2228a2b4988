"""Layers, attention and kernels: what models compute with, on tensors alone.

layout          how tokens are arranged, padded and packed; `buckets` brings packed batches to a few shapes
layers          the encoder layer, its operations, activations, norms
attention       attention for each layout; `positions` has rotations and biases by distance
disentangled    DeBERTa's attention, embeddings and convolution
encoder         embeddings, stacks and poolers as graphs
task_heads      bodies of heads as graphs, and losses
joined_tensors  one matrix in a file for several of ours
adapter_layers  layers with an adapter; `prompts` has virtual tokens and prefixes
backends        how the operations of a layer run on a CPU and on CUDA
kernels         Triton kernels
"""
