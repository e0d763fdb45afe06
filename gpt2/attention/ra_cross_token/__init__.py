"""RA-CT: gates each head's row of attention by a statistic of that row."""
