"""The report of a trained model as one HTML page, without external resources.

`figures` computes, `charts` draws, `page` combines; `flodl_hf.training.evaluation` collects the predictions.
"""
