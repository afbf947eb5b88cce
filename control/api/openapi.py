"""The OpenAPI 3.1 document, made from the routes and their msgspec types."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from control import VERSION
from control.api.types import Problem

JSON: Final = "application/json"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter in the query string or a header."""

    name: str
    description: str
    schema: dict[str, Any] = field(default_factory=lambda: {"type": "string"})
    place: str = "query"


@dataclass(frozen=True, slots=True)
class Operation:
    """One method on one path, as the router and the document need it.

    `body` and `answer` are msgspec types; None means bytes of `body_type` or `answer_type`.
    """

    method: str
    path: str
    name: str
    summary: str
    status: int = 200
    body: Any = None
    body_type: str = ""
    answer: Any = None
    answer_type: str = JSON
    parameters: tuple[Parameter, ...] = ()
    errors: tuple[int, ...] = ()


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return the OpenAPI document of these operations."""
    types = [
        Problem,
        *(each.body for each in operations if each.body),
        *(each.answer for each in operations if each.answer),
    ]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    by_type = {id(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    problem = {"description": "A problem (RFC 9457)", "content": {"application/problem+json": {"schema": schemas[0]}}}
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        answer = by_type[id(each.answer)] if each.answer else _stream(each.answer_type)
        described: dict[str, Any] = {
            "operationId": each.name,
            "summary": each.summary,
            "parameters": [*_path_parameters(each.path), *(_parameter(one) for one in each.parameters)],
            "responses": {
                str(each.status): {"description": "Done", "content": {each.answer_type: {"schema": answer}}},
                **{str(status): problem for status in each.errors},
                "default": problem,
            },
        }
        if each.body:
            described["requestBody"] = {"required": True, "content": {JSON: {"schema": by_type[id(each.body)]}}}
        elif each.body_type:
            described["requestBody"] = {
                "required": True,
                "content": {each.body_type: {"schema": _stream(each.body_type)}},
            }
        paths.setdefault(each.path, {})[each.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "Opificia sandbox host: control API", "version": VERSION, "license": {"name": "Apache-2.0"}},
        "servers": [{"url": "http://localhost"}],
        "paths": paths,
        "components": {"schemas": components},
    }


def _stream(content_type: str) -> dict[str, Any]:
    if content_type in ("application/octet-stream", "application/x-tar"):
        return {"type": "string", "format": "binary"}
    return {"type": "string"}


def _path_parameters(path: str) -> list[dict[str, Any]]:
    if "{session}" not in path:
        return []
    schema = {"type": "string", "pattern": "^[a-z0-9-]{1,64}$"}
    return [{"name": "session", "in": "path", "required": True, "schema": schema}]


def _parameter(one: Parameter) -> dict[str, Any]:
    return {"name": one.name, "in": one.place, "description": one.description, "schema": one.schema}
