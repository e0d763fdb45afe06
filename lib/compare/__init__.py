"""Comparison of two run directories: comparability, bitwise equality and loss differences."""
