"""Who may change what all requests of a server undergo."""

from __future__ import annotations

import hmac
import os

from fastapi import HTTPException, Request

from vllm_weir.server.state import server_state

HEADER = "X-Weir-Admin-Key"


def require_admin(request: Request) -> None:
    """FastAPI dependency: 403 if the server has no admin key or the request has a wrong one, 401 if it has none."""
    key = server_state(request).admin_key
    if not key:
        raise HTTPException(403, "this server has no admin key; start it with --weir-admin-key or WEIR_ADMIN_KEY")
    given = [request.headers[HEADER]] if HEADER in request.headers else []
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        given.append(token.strip(" \t"))
    if not given:
        raise HTTPException(401, f"this needs the admin key, in the header {HEADER}", {"WWW-Authenticate": "Bearer"})
    # Headers are bytes, which Starlette shows as Latin-1; a key is what the environment or a command line says.
    if not any(hmac.compare_digest(one.encode("latin-1"), os.fsencode(key)) for one in given):
        wrong = "the admin key is wrong"
        if HEADER not in request.headers:
            wrong = f"the admin key is missing: there is no header {HEADER}, and Authorization has another key"
        raise HTTPException(403, wrong)
