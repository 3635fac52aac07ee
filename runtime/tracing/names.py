"""All names that traces carry, in one table: OpenTelemetry's GenAI ones, which are still in motion, and our own for what those lack.

Source: OpenTelemetry semantic conventions for generative AI (status: development) and for HTTP; states of a request (queue, prefill,
decode) are only proposed there, so those names are ours, all under `ballast.`.
"""

from __future__ import annotations

PROVIDER = "ballast"
OPERATIONS = {"chat": "chat", "completion": "text_completion"}
"""The API's kind of request -> the operation; a span is called "OPERATION MODEL"."""
ATTEMPT_SPAN = "attempt"
"""A span is called "attempt GROUP"."""

# --- attributes of GenAI ---------------------------------------------------------------------------------------------------------
OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_CHOICES = "gen_ai.request.choice.count"
REQUEST_STREAM = "gen_ai.request.stream"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
RESPONSE_FIRST_CHUNK_S = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"

# --- attributes of other conventions ---------------------------------------------------------------------------------------------
ERROR_TYPE = "error.type"
HTTP_STATUS = "http.response.status_code"

# --- attributes of ours ----------------------------------------------------------------------------------------------------------
REQUEST_ID = "ballast.request.id"
SERVICE_CLASS = "ballast.service_class"
CHOICE = "ballast.choice"  # place of the answer among those of its request
GROUP = "ballast.group"
ATTEMPT = "ballast.attempt"  # from 1
DECIDED_BY = "ballast.decision.source"
DECISION_CAUSE = "ballast.decision.cause"
EXPECTED_TTFT_S = "ballast.expected.ttft"
EXPECTED_TPOT_S = "ballast.expected.tpot"
OUTCOME = "ballast.outcome"
REASON = "ballast.reason"
DEGRADED = "ballast.degraded"  # as x-ballast-degraded tells it
SECONDS = "ballast.seconds"
PART = "ballast.part."  # + a name of LATENCY_PARTS without "_s": seconds

# --- events ----------------------------------------------------------------------------------------------------------------------
EVENT_ARRIVAL = "ballast.arrival"  # the request's head is here
EVENT_PROMPT = "ballast.prompt_made"  # its token ids too
EVENT_QUEUE = "ballast.queue"  # a call begins to wait, for a group or in one
EVENT_ROUTE = "ballast.route_decision"
EVENT_PREFILL = "ballast.prefill"  # its group admits it
EVENT_DECODE = "ballast.decode"  # its first token is made
EVENT_COMMUNICATION = "ballast.communication"  # at the attempt's end: seconds that its steps spent in collectives
EVENT_RETURN = "ballast.return"  # the answer's end is on its way to the caller
