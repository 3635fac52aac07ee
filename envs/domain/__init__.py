"""Values of the problem: hardware, models, groups, plans, requests, snapshots, commands. Standard library and numpy only."""
