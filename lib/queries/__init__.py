"""Queries that read runs back from their directories or from a tracker's store."""
