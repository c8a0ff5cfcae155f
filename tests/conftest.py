"""A shell has what it starts in the background ignore Ctrl-C, and so would every process that a test starts."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
