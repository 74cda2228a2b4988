"""A process of ours at the other end of a socket: started, and waited for when it ends.

Decides how such a process begins and is made to end. It ends by itself when its socket does, so it never outlives who
started it. A second socket hands it open sockets, where it is to have any.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from dataclasses import dataclass

from flodl_hf.serving.link import Heard, Link, linked

__all__ = ["END_S", "Child", "start"]

END_S = 8.0
"""How long a process may take to end by itself."""
LOOK_S = 0.02
_PROGRAM = """
import os, sys
sys.path[:] = {path!r}
from {module} import serve
serve({given})
sys.stderr.flush()
os._exit(0)
"""


@dataclass(eq=False)
class Child:
    """One process.

    Attributes:
        process: itself.
        link: messages to it and from it.
        hands: what hands it open sockets, or None.
    """

    process: subprocess.Popen[bytes]
    link: Link
    hands: socket.socket | None = None

    @property
    def pid(self) -> int:
        """Its number."""
        return self.process.pid

    async def reaped(self, within_s: float = END_S) -> int:
        """Return its status; it ends by itself when its socket is closed, and is made to after a while.

        Args:
            within_s: how long it may take.
        """
        if self.hands is not None:
            self.hands.close()
        loop = asyncio.get_running_loop()
        until, killed = loop.time() + within_s, False
        while (status := self.process.poll()) is None:
            if loop.time() > until and not killed:
                self.process.kill()
                killed = True
            await asyncio.sleep(LOOK_S)
        return status


async def start(module: str, heard: Heard, *, hands: bool = False, memory: int | None = None) -> Child:
    """Start a process that runs ``serve`` of a module, with the descriptors of its sockets.

    Args:
        module: of ours; ``serve`` takes the descriptor of its messages and, where there are any, that of what it is
            handed and that of the memory.
        heard: called with each message.
        hands: whether it can be handed sockets.
        memory: the descriptor of a file that it shares, or None.
    """
    pairs = [socket.socketpair() for _ in range(1 + hands)]
    given = [theirs.fileno() for _, theirs in pairs]
    if memory is not None:
        given.append(memory)
    code = _PROGRAM.format(path=sys.path, module=module, given=", ".join(map(str, given)))
    # In a group of its own: Ctrl-C is for who started it, and lets it finish first.
    process = subprocess.Popen([sys.executable, "-c", code], pass_fds=given, stdin=subprocess.DEVNULL, process_group=0)
    for _, theirs in pairs:
        theirs.close()
    link = await linked(pairs[0][0], heard)
    if hands:
        pairs[1][0].setblocking(False)
    return Child(process, link, pairs[1][0] if hands else None)
