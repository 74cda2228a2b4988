"""The torture rig: damaged files, hostile texts, killed processes, and a verdict on the outcome of each.

    python -m tests.torture weights config --cases 2000
    python -m tests.torture weights --seed 0 --only 17

Every case is made again by its suite, a seed and a number. Workers have limits of time and memory, so that crashes and
hangs are counted. docs/guides/torture.md has the suites, the scale and the figures.
"""

from __future__ import annotations
