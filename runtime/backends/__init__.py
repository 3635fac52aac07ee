"""Groups of ranks as the service sees them: one interface, several kinds behind it."""
