"""Speed, measured side by side: the trainer against a plain loop, each mechanism against GPT-2."""
