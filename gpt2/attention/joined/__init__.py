"""Attention by FlexAttention passes over windows, merged by log-sum-exp."""
