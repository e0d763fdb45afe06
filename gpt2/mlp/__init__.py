"""MLP: GPT-2's dense core and mechanisms that read or modify its hidden layer."""
