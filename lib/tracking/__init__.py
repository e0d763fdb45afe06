"""Trackers: external programs that follow the records of a run, each in a process of its own."""
