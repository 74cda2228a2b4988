"""Compare an endpoint's outputs with its model's, and name the causes of differences.

targets    interface of the compared targets
http       endpoints over HTTP: text-embeddings-inference, OpenAI, Hugging Face
folder     folders, as sentence-transformers or we read them
onnx       ONNX files, run by ONNX Runtime
opening    open one of these from an address
reference  outputs of the model, computed correctly and with each known mistake
checks     the comparisons, and the cause of each difference
report     their results as a table and as JSON

``flodl-hf verify-endpoint`` is the command.
"""

from __future__ import annotations

from flodl_hf.parity.endpoint_checks.checks import verify_endpoint
from flodl_hf.parity.endpoint_checks.opening import open_target
from flodl_hf.parity.endpoint_checks.report import Report, Row
from flodl_hf.parity.endpoint_checks.targets import Target, TargetError

__all__ = ["Report", "Row", "Target", "TargetError", "open_target", "verify_endpoint"]
