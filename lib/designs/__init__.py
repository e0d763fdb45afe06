"""Sweep designs: grids and samples over axes, and ablation designs over features.

Each design generates Cells; ``combine`` resolves them and drops those that are not configurable.
"""
