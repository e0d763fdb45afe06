"""For every test, and every process that one starts."""

import os

# Whoever tests a change has not committed it yet. A test of that very rule takes it away again.
os.environ["DIRTY"] = "y"
