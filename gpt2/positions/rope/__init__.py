"""Rotary positions (RoPE): queries and keys of every head, rotated according to their position."""
