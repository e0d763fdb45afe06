"""The parts of the build system that know nothing of GPT-2."""
