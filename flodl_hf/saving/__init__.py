"""Writing a checkpoint folder: the source repeated where nothing changed, all of it at once.

model           a model as a folder
state           which tensors under which names, in which order and files
write           safetensors bytes, hashed on the way
json_text       a JSON text with some values changed
sentence_files  what folders of sentence-transformers have besides
publish         a folder put in place in one step
"""

from flodl_hf.saving.json_text import patch_json
from flodl_hf.saving.model import export_model
from flodl_hf.saving.publish import is_model_file, publish_folder
from flodl_hf.saving.state import WritePlan, plan_state, write_state
from flodl_hf.saving.write import WrittenFile, verify_files, write_bytes, write_safetensors

__all__ = [
    "WritePlan",
    "WrittenFile",
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
