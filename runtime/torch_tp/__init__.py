"""Uneven tensor parallelism on real torch workers: one controller without torch, one worker process per rank, none special."""
