"""Reading runs back, from whatever keeps them: their directories, or a tracker's store."""
