"""Environment set-up. Standard library only, no torch.

It runs before any package is installed, as ``python3 -m lib.setup`` from the root of the tree.
"""
