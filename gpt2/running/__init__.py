"""Train a plan, check the machine before, reproduce a finished run."""
