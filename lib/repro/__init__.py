"""What a run needs to be rebuilt: seeds and streams, the machine, the code, the record of them."""
