"""flodl_hf: Hugging Face encoder checkpoints both ways."""
