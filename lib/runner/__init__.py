"""Job runner: starts planned runs in worker processes and skips runs that are already done."""
