"""The check of the admin key, which it takes to change the server for every request."""

from __future__ import annotations

import hmac
import os

from fastapi import HTTPException, Request

from vllm_weir.server.state import server_state

HEADER = "X-Weir-Admin-Key"
_CHALLENGE = {"WWW-Authenticate": "Bearer"}


def require_admin(request: Request) -> None:
    """Refuse a request without the admin key (a FastAPI dependency).

    Raises:
        HTTPException: 403 if the server has no admin key, 401 if the request has none or a wrong one.
    """
    admin_key = server_state(request).admin_key
    if not admin_key:
        raise HTTPException(403, "this server has no admin key; start it with WEIR_ADMIN_KEY or --weir-admin-key-file")
    candidates = [request.headers[HEADER]] if HEADER in request.headers else []
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        candidates.append(token.strip(" \t"))
    if not candidates:
        raise HTTPException(401, f"this route needs the admin key in the header {HEADER}", _CHALLENGE)
    # Headers are bytes that Starlette decodes as Latin-1; the key is from the environment.
    if not any(hmac.compare_digest(key.encode("latin-1"), os.fsencode(admin_key)) for key in candidates):
        why = "the admin key is wrong"
        if HEADER not in request.headers:
            why = f"the admin key is missing: there is no header {HEADER}, and Authorization has another key"
        raise HTTPException(401, why, _CHALLENGE)
