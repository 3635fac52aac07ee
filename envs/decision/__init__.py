"""The contract that simulation and service share: encode, mask, decode, predict, plan, judge, break circuits."""
