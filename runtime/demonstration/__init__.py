"""What `make serve` starts: SmolLM2 on three emulated unlike ranks in two groups."""
