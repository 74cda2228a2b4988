"""Adapters: small trainable modules added to frozen weights, together with their head.

`settings` defines the settings of an adapter; `fresh` creates one; `folder` and `write` read and write peft's files,
and `peft_file` parses their settings; `flodl_hf.models.adapted` adds one to a model and removes it. An adapter always
includes the head that was trained with it. What adapters compute is in `flodl_hf.nn.adapter_layers` and
`flodl_hf.nn.prompts`.
"""

from flodl_hf.models.adapters.settings import IA3, Lora, Prefix, Prompt

__all__ = ["IA3", "Lora", "Prefix", "Prompt"]
