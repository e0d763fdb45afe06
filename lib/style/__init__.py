"""How the tree is written: whitespace, formatting, the truth of its documents, its architecture."""
