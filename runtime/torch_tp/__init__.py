"""Tensor-parallel engine: uneven, sliding splits of one model over unlike ranks."""
