"""Environment of a run: interpreter and packages, hardware, and the state of the source tree."""
