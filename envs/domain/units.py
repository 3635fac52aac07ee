"""Unit factors. Inside the code only seconds, bytes, tokens and FLOP exist; convert once, where data enters."""

KIB = 1024
MIB = 1024**2
GIB = 1024**3
GB = 10**9
TFLOP = 10**12
MS = 1e-3
US = 1e-6
