"""Trackers: external programs that display a run while it trains.

A separate process per tracker follows the run's records; training neither calls a tracker library
nor waits for one. The run directory remains the authoritative record.
"""
