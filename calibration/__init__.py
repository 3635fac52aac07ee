"""Fits kernel coefficients to published timings. Offline only: nothing in envs, agents or runtime imports it."""
