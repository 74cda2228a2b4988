"""Write the files of a checkpoint folder; `flodl_hf.models.saving` decides which ones a model needs.

state           which tensors under which names, in which order and files
write           safetensors bytes, hashed on the way
json_text       a JSON text with some values changed
sentence_files  what folders of sentence-transformers have besides
publish         a folder put in place in one step
"""

from flodl_hf.checkpoints.saving.json_text import patch_json
from flodl_hf.checkpoints.saving.publish import is_model_file, publish_folder
from flodl_hf.checkpoints.saving.state import WritePlan, plan_state, write_state
from flodl_hf.checkpoints.saving.write import WrittenFile, verify_files, write_bytes, write_safetensors

__all__ = [
    "WritePlan",
    "WrittenFile",
    "is_model_file",
    "patch_json",
    "plan_state",
    "publish_folder",
    "verify_files",
    "write_bytes",
    "write_safetensors",
    "write_state",
]
