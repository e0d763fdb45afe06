"""What the machine does while a run trains, sampled by a process of its own."""
