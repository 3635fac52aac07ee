"""OpenTelemetry traces of requests. Nothing of OpenTelemetry is imported before a `Tracer` is made, and none is made unless asked for."""
