"""``task="embedding"``: vectors of texts, trained by the losses of `flodl_hf.training.losses`."""
