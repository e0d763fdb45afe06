"""Reads run directories, and nothing else, and puts comparable runs side by side."""
