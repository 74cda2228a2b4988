"""Several devices with a common queue of batches.

Each device has a thread that takes the next batch when it has finished one, so devices of different speed are all used.
`flodl_hf.inference.engine` runs the batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import Thread

import numpy as np
import torch

from flodl_hf.inference.batch import Work, plan_batches
from flodl_hf.inference.decode.rows import TokenTable
from flodl_hf.inference.engine import Engine, Pending, current

# Batches that are started ahead on a device, so that it never waits for its thread.
_AHEAD = 2


class Fleet:
    """Runs rows on several engines.

    Args:
        engines: an engine for each device; devices may be repeated.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = list(engines)

    def start(self, table: TokenTable, work: Work, places: Sequence[Sequence[int]] | None = None) -> Pending:
        """Start the prediction of all rows and return immediately; see `Engine.start`."""
        pending = Pending(len(table))
        budget = min(engine.budget for engine in self.engines)
        smallest = min(self.engines, key=lambda engine: engine.budget)
        alone = smallest.options.batch_invariant
        queue = deque(plan_batches(table.lengths, budget, equal=smallest.exact, alone=alone))
        for engine in self.engines:
            args = (engine, pending, queue, table, work, places)
            thread = Thread(target=_serve, args=args, name=f"flodl-hf-{engine.device}", daemon=True)
            pending.threads.append(thread)
            thread.start()
        return pending


def _serve(
    engine: Engine,
    pending: Pending,
    queue: deque[np.ndarray],
    table: TokenTable,
    work: Work,
    places: Sequence[Sequence[int]] | None,
) -> None:
    sent: deque[torch.cuda.Event] = deque()
    try:
        with torch.inference_mode(), current(engine.device, engine.options.precision):
            while queue and not pending.faults:
                try:
                    batch = queue.popleft()
                except IndexError:
                    return
                engine.send(pending, table, batch, work, places)
                if engine.cuda:
                    event = torch.cuda.Event()
                    event.record()
                    sent.append(event)
                    if len(sent) > _AHEAD:
                        sent.popleft().synchronize()
    except BaseException as fault:  # raised again when results are requested
        pending.faults.append(fault)
