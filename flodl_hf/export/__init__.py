"""Writing a checkpoint folder: the source repeated where nothing changed, all of it at once.

state      which tensors under which names, in which order and files
write      safetensors bytes, hashed on the way
json_text  a JSON text with some values changed
publish    a folder put in place in one step
convert    a ``.bin`` checkpoint written as safetensors
"""

from .convert import convert_bin
from .json_text import patch_json
from .model import export_model
from .publish import is_model_file, publish_folder
from .state import WritePlan, plan_state, write_state
from .write import WrittenFile, verify_files, write_bytes, write_safetensors

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
