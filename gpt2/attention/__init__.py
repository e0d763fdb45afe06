"""Attention, composed of one projection, one pattern, and any score terms and gates."""
