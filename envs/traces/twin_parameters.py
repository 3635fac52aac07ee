"""Numbers of the synthetic twins: statistics of public traces, with their sources. No row of any trace is here.

Lengths: mixtures of lognormals fitted on the public files (natural logs; Kolmogorov-Smirnov distance to the data .01 to
.11); the bounds are the files' smallest and largest values. Sources: Azure/AzurePublicDataset 2023 (Patel et al.,
Splitwise, ISCA 2024; CC-BY-4.0), kvcache-ai/Mooncake FAST25-release (Qin et al., FAST 2025; Apache-2.0),
alibaba/ServeGen m-large (Xiang et al., 2505.09999; Apache-2.0) for the shares of clients.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LengthMixture:
    """Components (weight, mu, sigma) of lognormals in tokens, and the bounds draws are held inside."""

    components: tuple[tuple[float, float, float], ...]
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class MovingRate:
    """Arrival rate exp(x(t)) around `rate_per_s`, x an Ornstein-Uhlenbeck process of spread `sigma`, memory `memory_s`."""

    rate_per_s: float
    sigma: float
    memory_s: float


CONV_PROMPT = LengthMixture(((0.633, 6.27, 1.00), (0.291, 6.98, 0.06), (0.076, 8.32, 0.03)), 2, 14_050)
CONV_OUTPUT = LengthMixture(((0.425, 4.57, 0.36), (0.296, 4.73, 1.01), (0.279, 6.01, 0.05)), 7, 1_000)
CONV_RATE = MovingRate(5.53, 0.29, 500.0)
"""Memory: lag-1 autocorrelation of minute counts .85, or .90 = exp(-60 / memory) once the counts' own noise is taken off.
sigma: so that an hour's counts have variance / mean 1.4 at 1 s, 3.9 at 10 s, 16 at 60 s (the part of the slow movement
that an hour's own mean absorbs is made up for)."""
CONV_GAP_SHAPE = 0.87
"""Gamma shape of the gaps once the rate is taken out (KS .017)."""

CODE_PROMPT = LengthMixture(((0.325, 5.58, 1.29), (0.625, 7.57, 0.63), (0.050, 8.91, 0.03)), 3, 7_437)
CODE_OUTPUT = LengthMixture(((0.180, 1.97, 0.16), (0.520, 2.53, 0.35), (0.300, 3.70, 0.88)), 6, 1_899)
CODE_BURST_MEDIAN, CODE_BURST_SIGMA, CODE_BURST_MOST = 26.0, 1.376, 1_000
"""Requests in a burst, lognormal: p50 26 and mean 67 give sigma = sqrt(2 ln(67 / 26)); p90 is then 152 (measured 151)."""
CODE_BURST_RATE_PER_S = 11.0
CODE_BURST_RATE_SIGMA = 0.5
"""Bursts differ in rate (lognormal, mean time kept), so that counts have variance / mean 13 at 1 s."""
CODE_BURST_GAP_MOST_S = 1.0
"""Bursts are what lies between gaps over 1 s, so a gap inside one stays below."""
CODE_SILENCE_SHORT = (0.62, 1.6)
CODE_SILENCE_LONG_S = 36.0
CODE_SILENCE_MOST_S = 174.0
"""Silence in s = 1 + exponential of mean 1.6 (62 %) or 36 (38 %): p50 3.3 (measured 3.2), mean 15.7 (15.7), p90 49 (40)."""

MOONCAKE_PROMPT = LengthMixture(((0.097, 6.81, 0.03), (0.107, 7.22, 0.23), (0.796, 9.22, 0.91)), 891, 124_847)
MOONCAKE_OUTPUT = LengthMixture(((0.240, 3.42, 1.47), (0.284, 5.77, 0.67), (0.476, 6.07, 0.27)), 1, 2_000)
MOONCAKE_RATE = MovingRate(3.26, 0.115, 60.0)
"""Counts a minute have CV .12 and lag-1 autocorrelation .11, so a short memory;
sigma^2 = .12^2 - 1 / 196 and what a minute averages away."""
MOONCAKE_TICK_S = 3.0
MOONCAKE_BLOCK_TOKENS = 512
MOONCAKE_CONTINUED_FRACTION = 0.44
"""Chance that a request continues an earlier one, once there is one to continue; 37 % of all requests do."""
MOONCAKE_CONTINUED_EXPONENT = 0.25
"""Longer prompts are continued ones more often: 29.0 blocks against 22.3."""
MOONCAKE_SHARED_BETA = (2.0, 1.0)
"""Share of a continued prompt's blocks that it takes over, beta. Measured: mean .71 by request; here lower, because the
nearest request at hand stands in for the drawn size, which lengthens short shares."""
MOONCAKE_GAP_MEDIAN_S, MOONCAKE_GAP_SIGMA = 130.0, 1.02
"""Time since a block's last use, lognormal. Measured: p10 / 50 / 90 = 42 / 123 / 453 s."""

CLIENT_SHARES = (0.16,) + (0.0675,) * 4 + (0.04,) * 5 + (0.37 / 152,) * 152
"""Share of requests by client: the first 1 / 5 / 10 of 162 carry 16 / 43 / 63 %."""
REQUESTS_PER_SESSION = 5.0
"""Mean of a geometric number of requests before a client opens a new session. Assumed: the Azure files have no sessions."""
