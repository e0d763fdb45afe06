"""Analysis of finished runs: result tables, curves, verdicts, computed
from run directories only.
"""
