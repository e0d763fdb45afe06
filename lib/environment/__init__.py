"""What a run is trained in: its interpreter and packages, the machine's hardware, the code's tree."""
