"""Speed benchmarks: the trainer against a plain loop, mechanisms against GPT-2, settings, NSA."""
