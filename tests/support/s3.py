"""A server of S3 for tests."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import fsspec

from tests.support.measure import eventually
from tests.support.ports import free_port

KEY, SECRET, REGION = "k", "s", "eu-west-1"


@contextlib.contextmanager
def s3_server(bucket: str) -> Iterator[dict[str, Any]]:
    """Yield fsspec's storage_options of a moto server that has a bucket."""
    port = free_port()
    # A process of its own: vLLM looks at every attribute of every imported module when an engine starts,
    # and Flask's proxies raise when looked at.
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL
    )
    try:
        eventually(lambda: _answers(port, server), True, 60)
        options = {
            "key": KEY,
            "secret": SECRET,
            "endpoint_url": f"http://127.0.0.1:{port}",
            "client_kwargs": {"region_name": REGION},
        }
        fsspec.filesystem("s3", **options).mkdir(bucket)
        yield options
    finally:
        server.terminate()
        server.wait(60)


def s3_environment(options: dict[str, Any]) -> dict[str, str]:
    """Return the environment in which programs find the server by themselves."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": options["endpoint_url"],
        "AWS_DEFAULT_REGION": REGION,
    }


def _answers(port: int, server: subprocess.Popen[bytes]) -> bool:
    assert server.poll() is None, "the S3 server of the tests ended: is moto[server] installed?"
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
