"""Rotary positions (RoPE): the queries and keys of every head, rotated by where they stand."""
