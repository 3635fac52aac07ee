"""Networks of the learned policies: the scorer of candidates and its stable-baselines3 adapter."""
