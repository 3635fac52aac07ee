"""How one TP group's batch advances: pure compiled functions on arrays, with no clock of their own."""
