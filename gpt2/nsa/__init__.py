"""Native sparse attention: compressed blocks, selected blocks and a window, gated and summed."""
