"""What Triton's Python backend runs; everything is said in config.pbtxt."""

from flodl_hf.serving.triton_server import TritonPythonModel

__all__ = ["TritonPythonModel"]
