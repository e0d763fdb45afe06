"""Lists of combinations: grids and samples of axes, and designs over features.

Each way only makes Cells; ``combine`` finds out which of them the configuration allows.
"""
