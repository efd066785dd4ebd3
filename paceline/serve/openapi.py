"""The OpenAPI document of a server, and a page for people that shows it."""

from __future__ import annotations

import html
from typing import Any

import msgspec

from paceline.serve.http_request import LEAST_DEADLINE_S, MOST_DEADLINE_S
from paceline.serve.served_tensor import ServedTensor

_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "datatype": {"type": "string", "examples": ["FP32", "INT64"]},
        "data": {"type": "array", "items": {}},
        "parameters": {"type": "object"},
    },
}
_NO = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
_DEADLINE = {
    "name": "Paceline-Deadline",
    "in": "header",
    "description": "Seconds after which the answer is of no use.",
    "schema": {"type": "number", "minimum": LEAST_DEADLINE_S, "maximum": MOST_DEADLINE_S},
}


def openapi(model: str, version: str, inputs: list[ServedTensor]) -> dict[str, Any]:
    """Returns the document for a server of this model."""

    def path_of(name: str, value: str) -> dict[str, Any]:
        return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}, "example": value}

    def operation(
        summary: str, *, body: Any = None, codes: dict[str, str] | None = None, **more: Any
    ) -> dict[str, Any]:
        answers: dict[str, Any] = {"200": {"description": "Done.", "content": {"application/json": {"schema": {}}}}}
        answers |= {code: {"description": text, **_NO} for code, text in (codes or {}).items()}
        found: dict[str, Any] = {"summary": summary, "responses": answers, **more}
        if body is not None:
            found["requestBody"] = body
        return found

    asked_wrong = {
        "400": "The body is wrong; the sentence says where.",
        "413": "The body is too large.",
        "422": "The model could not compute this.",
        "429": "Busy: it could not be answered before its deadline. Retry-After says when to try again.",
        "503": "The process that computed it died, and so did the next; or the model is not loaded.",
        "504": "The model did not answer before the deadline.",
    }
    unknown = {"404": "There is no such model or version."}
    name, number = path_of("model", model), path_of("version", "1")
    infer_body = {"required": True, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Infer"}}}}
    paths: dict[str, Any] = {
        "/predict": {
            "post": operation(
                "Ask the model: lists of numbers, a .npy file or an image.",
                body={
                    "required": True,
                    "content": {
                        "application/json": {"schema": {"type": ["array", "object"]}},
                        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
                        "image/png": {"schema": {"type": "string", "format": "binary"}},
                    },
                },
                codes=asked_wrong,
                parameters=[_DEADLINE],
            )
        },
        "/v2": {"get": operation("What server this is.")},
        "/v2/health/live": {"get": operation("Whether the server runs.")},
        "/v2/health/ready": {"get": operation("Whether it answers.", codes={"503": "Not now."})},
        "/v2/repository/index": {"post": operation("Models and their versions.", codes={"400": asked_wrong["400"]})},
        "/metrics": {"get": operation("Counters and histograms for Prometheus.")},
    }
    for action, words in (("load", "Load what the checkpoint is now."), ("unload", "Have nobody answer.")):
        codes = {**unknown, "400": "The checkpoint was not loaded, and all is as it was."}
        paths[f"/v2/repository/models/{{model}}/{action}"] = {"post": operation(words, codes=codes, parameters=[name])}
    for at, parameters in (("/v2/models/{model}", [name]), ("/v2/models/{model}/versions/{version}", [name, number])):
        ready = {**unknown, "503": "Not now."}
        paths[at] = {"get": operation("What the model takes and gives.", codes=unknown, parameters=parameters)}
        paths[f"{at}/ready"] = {"get": operation("Whether it answers.", codes=ready, parameters=parameters)}
        paths[f"{at}/config"] = {
            "get": operation("The same for Triton's clients.", codes=unknown, parameters=parameters)
        }
        paths[f"{at}/infer"] = {
            "post": operation(
                "Ask the model by the Open Inference Protocol, with JSON or binary tensors.",
                body=infer_body,
                codes={**unknown, **asked_wrong},
                parameters=[*parameters, _DEADLINE],
            )
        }
    takes = ", ".join(spec.words for spec in inputs) or "not known yet"
    return {
        "openapi": "3.1.0",
        "info": {"title": f"Paceline: {model}", "version": version, "description": f"The model takes {takes}."},
        "paths": paths,
        "components": {
            "schemas": {
                "Error": {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]},
                "Tensor": _TENSOR,
                "Infer": {
                    "type": "object",
                    "required": ["inputs"],
                    "properties": {
                        "id": {"type": "string"},
                        "inputs": {"type": "array", "items": {"$ref": "#/components/schemas/Tensor"}},
                        "outputs": {"type": "array", "items": {"type": "object"}},
                        "parameters": {"type": "object"},
                    },
                },
            }
        },
    }


def openapi_page(document: dict[str, Any]) -> str:
    """Returns the document as a page of HTML that needs nothing else."""
    parts = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            answers = "".join(
                f"<li><code>{code}</code> {html.escape(answer['description'])}</li>"
                for code, answer in operation["responses"].items()
            )
            head = f"<code>{method.upper()} {html.escape(path)}</code> {html.escape(operation['summary'])}"
            parts.append(f"<details><summary>{head}</summary><ul>{answers}</ul></details>")
    info = document["info"]
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{html.escape(info['title'])}</title><style>body{{font:16px/1.5 system-ui,sans-serif;max-width:60rem;"
        "margin:2rem auto;padding:0 1rem}code{background:#8882;padding:.1em .3em}details{margin:.5rem 0}</style>"
        f"<h1>{html.escape(info['title'])}</h1><p>{html.escape(info['description'])} "
        "<a href='/openapi.json'>openapi.json</a> · <a href='/'>try it</a></p>"
        f"{''.join(parts)}<pre>{html.escape(msgspec.json.format(msgspec.json.encode(document['components'])).decode())}</pre>"
    )
