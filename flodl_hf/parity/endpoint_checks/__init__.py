"""What an endpoint answers beside what its model should: the causes of differences by their names.

targets    what can be asked in place of a model
http       endpoints over HTTP: text-embeddings-inference, OpenAI, Hugging Face
folder     folders, as sentence-transformers or we read them
onnx       ONNX files, run by ONNX Runtime
opening    from an address to one of these
reference  what the model itself gives, as it should be computed and with each known mistake
checks     the comparisons, and which cause explains what was found
report     their results as a table and as JSON

``flodl-hf verify-endpoint`` is the command.
"""

from __future__ import annotations

from flodl_hf.parity.endpoint_checks.checks import verify_endpoint
from flodl_hf.parity.endpoint_checks.opening import open_target
from flodl_hf.parity.endpoint_checks.report import Report, Row
from flodl_hf.parity.endpoint_checks.targets import Target, TargetError

__all__ = ["Report", "Row", "Target", "TargetError", "open_target", "verify_endpoint"]
