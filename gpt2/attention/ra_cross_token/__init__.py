"""Cross-token gate (RA-CT): scales the attention row of each head by a statistic of that row."""
