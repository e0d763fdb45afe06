"""Verification that finished runs can be published as a comparison, as a checklist."""
