"""AdamW with SPAM: spike-aware clipping, moment damping and periodic moment reset."""
