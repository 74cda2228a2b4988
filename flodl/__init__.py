"""flodl: a fluent graph builder for PyTorch, a tree of named sub-graphs, observation, and training."""
