"""What a training step needs, predicted at full size without running it: memory and FLOPs."""
