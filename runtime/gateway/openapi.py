"""The API as an OpenAPI document, made of the very types that decode it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from runtime.gateway.openai_schemas import ChatBody, CompletionBody


def description(version: str, models: Sequence[str]) -> dict[str, Any]:
    """An OpenAPI 3.1 document of a service of these models."""
    (chat, completion), components = msgspec.json.schema_components((ChatBody, CompletionBody), ref_template="#/components/schemas/{name}")
    for body in ("ChatBody", "CompletionBody"):
        if models:
            components[body]["properties"]["model"]["enum"] = list(models)
    components["Error"] = {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Ballast", "version": version},
        "paths": {
            "/v1/chat/completions": _post("One answer or more to a conversation.", chat),
            "/v1/completions": _post("One answer or more to a text.", completion),
            "/v1/models": _get("The models that are served."),
            "/v1/models/{model_id}": _get("One of them.", ("model_id", models)),
            "/livez": _get("Whether the process answers."),
            "/ready": _get("Whether a token can be made; 503 where not."),
            "/health": _get("The same as /ready."),
            "/metrics": _get("Prometheus metrics.", content="text/plain"),
            "/version": _get("The version."),
        },
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _post(summary: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
            "responses": {
                "200": {
                    "description": "The answer, or with stream=true its chunks and `data: [DONE]`.",
                    "content": {"application/json": {}, "text/event-stream": {}},
                },
                "default": _error(),
            },
        }
    }


def _get(summary: str, parameter: tuple[str, Sequence[str]] | None = None, content: str = "application/json") -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": summary, "content": {content: {}}}, "default": _error()},
    }
    if parameter is not None:
        name, values = parameter
        schema: dict[str, Any] = {"type": "string"} | ({"enum": list(values)} if values else {})
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema}]
    return {"get": operation}


def _error() -> dict[str, Any]:
    return {"description": "An error.", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
