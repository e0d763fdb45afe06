"""Imported by the fork server alone: loads what its workers would otherwise load for themselves.

The garbage collector is off meanwhile, since modules make many objects and next to no garbage, and
what is there afterwards is frozen: no collection in a worker walks it again, or writes to pages
that are shared.
"""

import gc
import os
from importlib import import_module

# Names of modules, separated by commas.
MODULES = "KABLATE_PRELOAD"

if MODULES in os.environ:
    # Not for what a worker starts itself.
    modules = os.environ.pop(MODULES)
    gc.disable()
    try:
        for name in filter(None, modules.split(",")):
            import_module(name)
    finally:
        gc.freeze()
        gc.enable()
