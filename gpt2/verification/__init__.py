"""``make verify-results``: run selection and the checks that need GPT-2's setting names.

The checks that do not depend on setting names are in ``lib.verify``. Does not import torch.
"""
