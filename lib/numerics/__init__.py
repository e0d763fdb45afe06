"""Numbers that are not finite: looking for them, and telling which tensors hold them."""
