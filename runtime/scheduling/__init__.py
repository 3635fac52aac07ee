"""Which group serves which call: telemetry, the decision with its retreats, the dispatcher."""
