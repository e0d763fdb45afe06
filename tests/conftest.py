"""For every test, and every process that one starts."""

import os
import signal

# Whoever tests a change has not committed it yet. A test of that very rule takes it away again.
os.environ["DIRTY"] = "y"
# A shell that starts the tests in the background has them, and all they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
