"""Write models for other engines, and compare the results. A model's own folder: `flodl_hf.models.saving`.

verify      compare a written folder with its source and with transformers
graph_file  a ``.bin`` checkpoint, or a graph's ``.fdl`` file, written as a folder of safetensors
engine      files for other engines: ONNX, torch.export, each verified
traced      modules that are traced for them
"""

from flodl_hf.export.graph_file import convert_bin

__all__ = ["convert_bin"]
