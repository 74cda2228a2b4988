"""Imported first by the process that forks ranks: it ignores SIGTERM, which the launcher forwards to the ranks."""

import signal

__all__: list[str] = []

signal.signal(signal.SIGTERM, signal.SIG_IGN)
