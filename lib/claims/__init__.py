"""Claims of documents about runs: a file of quoted numbers, its check, and its rendering."""
