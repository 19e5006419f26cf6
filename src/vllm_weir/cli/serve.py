"""`weir serve`: ``vllm serve`` with Weir's routes on."""

from __future__ import annotations

import atexit
import os
from collections.abc import MutableMapping
from importlib.metadata import entry_points

from vllm_weir.config.env import disabled
from vllm_weir.errors import WeirError
from vllm_weir.guard import refuse
from vllm_weir.schema.json_text import fits_header
from vllm_weir.server.endpoint_plugin import load_route_modules
from vllm_weir.server.limits import ADMIN_KEY, ServerLimits
from vllm_weir.server.shared.directory import clear

OPTION = "--weir-admin-key"
HELP = f"""Weir's own option, the others are vLLM's:
  {OPTION} KEY, or {ADMIN_KEY} in the environment: the key for what changes all requests
"""
GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)
"""Groups whose plugins vLLM loads unless ``VLLM_PLUGINS`` says otherwise."""


def serve(arguments: list[str]) -> None:
    """Run ``vllm serve`` with these arguments in this process.

    Raises:
        WeirError: if Weir would not be on.
    """
    rest = prepare(arguments, os.environ)
    _check_loading()
    from vllm_weir.patches.serve_command import vllm_serve

    # vLLM kills its API-server processes when there are several. Runs after what this process itself clears up.
    atexit.register(clear, os.getpid(), ServerLimits.load().directory)
    if asks_for_help(rest):
        print(HELP)
    vllm_serve(rest)


def prepare(arguments: list[str], environ: MutableMapping[str, str]) -> list[str]:
    """Take Weir's own option off the arguments and set the environment; returns vLLM's arguments."""
    if disabled(environ):
        raise WeirError("is set, so Weir is off; unset it, or use `vllm serve`", "WEIR_DISABLE")
    if environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise WeirError("is set: that frontend runs no plugins; unset it", "VLLM_USE_RUST_FRONTEND")
    rest, key = _take_key(arguments)
    if key is not None:
        # The environment of a process is its user's alone to read; its command line is everybody's.
        environ[ADMIN_KEY] = key
    if not fits_header(environ.get(ADMIN_KEY, "")):
        raise WeirError("is a line of text, without blanks or a line break around it, which no header has", ADMIN_KEY)
    ServerLimits.load(environ)
    named = environ.get("VLLM_PLUGINS")
    if named is None:
        environ["VLLM_PLUGINS"] = ",".join(all_plugins())
    elif "weir" not in named.split(","):
        raise WeirError(f"is {named!r} and leaves Weir out; add weir, or unset it", "VLLM_PLUGINS")
    return rest


def _check_loading() -> None:
    """Raise WeirError where the server would start without Weir's routes."""
    try:
        load_route_modules()
    except Exception as e:
        raise WeirError(refuse.cause_of(e)) from e


def asks_for_help(arguments: list[str]) -> bool:
    """Whether vLLM will print its help; it knows ``--help=section`` too."""
    return any(one in ("-h", "--help") or one.startswith("--help=") for one in arguments)


def all_plugins() -> list[str]:
    """Every plugin that vLLM would load by itself, and Weir: naming one would switch the others off."""
    names = dict.fromkeys(entry.name for group in GROUPS for entry in entry_points(group=group))
    return list(names | {"weir": None})


def _take_key(arguments: list[str]) -> tuple[list[str], str | None]:
    rest: list[str] = []
    key = None
    waiting = iter(arguments)
    for argument in waiting:
        if argument == OPTION:
            key = next(waiting, "")
        elif argument.startswith(f"{OPTION}="):
            key = argument.partition("=")[2]
        else:
            rest.append(argument)
    if key is not None and not key.strip():
        raise WeirError("expected a key", OPTION)
    return rest, key
