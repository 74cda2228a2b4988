"""Several ranks as one: starting them, sharing work out, deciding when to average, and averaging.

Built on `torch.distributed`, under torchrun or with our own launcher. Loops, losses and files belong to `flodl.train`.
"""

from flodl.distributed.cadence import ElChe
from flodl.distributed.group import Ranks, join_ranks
from flodl.distributed.launch import RankError, launch

__all__ = ["ElChe", "RankError", "Ranks", "join_ranks", "launch"]
