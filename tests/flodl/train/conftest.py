"""Lets tests use the small runs of `test_resume`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
