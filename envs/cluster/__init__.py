"""The simulated cluster: simpy gives the group kernel a clock and neighbours. Imports neither agents nor runtime."""
