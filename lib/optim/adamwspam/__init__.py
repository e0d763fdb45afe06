"""AdamW with SPAM: spike-aware gradient clipping, moment damping and periodic moment resets."""
