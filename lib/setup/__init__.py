"""Setting up: an interpreter that has what the tree needs. Standard library only, and no torch.

It runs before anything is installed, as ``python3 -m lib.setup`` from the tree's top folder.
"""
