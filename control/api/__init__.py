"""The HTTP API of control: `/v1` on a unix socket, described by `/openapi.json`."""
