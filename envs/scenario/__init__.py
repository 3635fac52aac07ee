"""The operator's cluster in files: catalogues of GPUs, models and links, and cluster files, read into domain values."""
