"""How long one step of a group takes and what fits into its memory. Pure functions on arrays."""
