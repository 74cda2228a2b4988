"""Compare an endpoint's outputs with its model's, and name the causes of differences.

targets    endpoints over HTTP, folders and ONNX files
reference  outputs of the model, computed correctly and with each known mistake
checks     the comparisons, and the cause of each difference

``flodl-hf verify-endpoint`` is the command.
"""

from __future__ import annotations

from flodl_hf.parity.endpoint_checks.checks import Report, verify_endpoint
from flodl_hf.parity.endpoint_checks.targets import TargetError

__all__ = ["Report", "TargetError", "verify_endpoint"]
