"""Preloading of modules in the fork server, so that forked workers do not import them again.

The garbage collector is disabled during the imports, which create many objects and almost no
garbage. Afterwards all objects are frozen, so that collections in workers do not traverse them or
write to shared memory pages.
"""

import atexit
import gc
import os
import sys
from importlib import import_module

# Environment variable with comma-separated module names.
MODULES = "KABLATE_PRELOAD"

if MODULES in os.environ:
    # Removed, so that child processes of a worker do not preload.
    modules = os.environ.pop(MODULES)
    gc.disable()
    try:
        for name in filter(None, modules.split(",")):
            import_module(name)
    except (ImportError, MemoryError):
        # The worker that needs the module reports the cause; here, it would be a traceback.
        pass
    finally:
        gc.freeze()
        gc.enable()
        if "triton._C" in sys.modules:
            # Its binding reports objects that are left at the exit on thirty lines of stderr.
            atexit.register(gc.unfreeze)
