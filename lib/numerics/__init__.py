"""Detection of non-finite values and of the tensors that contain them."""
