"""Write models for other engines, and compare the results. A model's own folder: `flodl_hf.models.saving`.

verify      compare a written folder with its source and with transformers
convert     a ``.bin`` checkpoint written as safetensors
engine      files for other engines: ONNX, torch.export, each verified
traced      modules that are traced for them
graph_file  convert a graph's own ``.fdl`` file to a folder and back
"""

from flodl_hf.export.convert import convert_bin

__all__ = ["convert_bin"]
