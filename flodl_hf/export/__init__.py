"""What is made of a model for others, and the proof of it. How a model's own folder is written is `flodl_hf.saving`.

verify        a folder that was written, compared with what it came from and with transformers
convert       a ``.bin`` checkpoint written as safetensors
engine        files for other engines: ONNX, torch.export, each proved
traced        the modules that are traced for them
onnx_session  an ONNX file, run
graph_file    a graph's own ``.fdl`` file, to a folder and back
"""

from flodl_hf.export.convert import convert_bin
from flodl_hf.saving import (
    WritePlan,
    WrittenFile,
    export_model,
    is_model_file,
    patch_json,
    plan_state,
    publish_folder,
    verify_files,
    write_bytes,
    write_safetensors,
    write_state,
)

__all__ = [
    "WritePlan",
    "WrittenFile",
    "convert_bin",
    "export_model",
    "is_model_file",
    "patch_json",
    "plan_state",
    "publish_folder",
    "verify_files",
    "write_bytes",
    "write_safetensors",
    "write_state",
]
