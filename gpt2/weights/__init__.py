"""Weights in and out: a GPT-2 of transformers as the start of a run, a finished run as a folder."""
