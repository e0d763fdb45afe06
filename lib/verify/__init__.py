"""Whether finished runs may be published as a comparison, row by row of a checklist."""
