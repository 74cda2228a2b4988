"""Imported first by the process that forks ranks: it ignores SIGTERM, which the launcher forwards to the ranks."""

import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)
