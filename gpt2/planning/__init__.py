"""From a configuration to a plan: which runs there are, what they cost, how far they are."""
