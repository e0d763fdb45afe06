"""Analysis of finished runs: result tables, curves, significance tests and leaderboards, computed
from run directories only.
"""
