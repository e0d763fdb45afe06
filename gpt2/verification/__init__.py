"""``make verify-results``: what GPT-2's trackers and manifests call their settings, and which runs
are compared. The checks that need no such names are in ``lib.verify``. Imports no torch."""
