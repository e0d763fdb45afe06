"""Evaluation of a finished run with quantized weights; training does not use quantization."""
