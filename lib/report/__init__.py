"""Analysis of finished runs: result tables, curves, verdicts and leaderboards, computed
from run directories only.
"""
