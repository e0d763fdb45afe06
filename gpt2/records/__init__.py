"""GPT-2's view of run directories: files, audit, comparison, verification."""
