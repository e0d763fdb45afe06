"""Style checks of the tree: whitespace, formatting, names in documents, architecture rules."""
