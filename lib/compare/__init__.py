"""Whether two run directories may be compared, whether they are the same bytes, and by how much
their losses differ. Reads run directories, and nothing else."""
