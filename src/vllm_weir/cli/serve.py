"""`weir serve`: ``vllm serve`` with Weir's routes."""

from __future__ import annotations

import atexit
import errno
import os
import socket
from collections.abc import MutableMapping
from importlib.metadata import entry_points

from vllm_weir.cli.options import take
from vllm_weir.compat import default_capture
from vllm_weir.compat.rhizonymph.modules import OPTION as MODULES_OPTION
from vllm_weir.compat.rhizonymph.modules import put_options as put_modules
from vllm_weir.config.env import disabled
from vllm_weir.errors import WeirError, brief
from vllm_weir.guard import refuse
from vllm_weir.schema.fields import fits_header
from vllm_weir.server import hooks, lenses, store, warm
from vllm_weir.server.endpoint_plugin import load_route_modules
from vllm_weir.server.limits import ADMIN_KEY, ServerLimits
from vllm_weir.server.saes import OPTION as SAE_OPTION
from vllm_weir.server.saes import check_given, model_in, put_options
from vllm_weir.server.shared.directory import clear
from vllm_weir.server.shipped import put_options as put_shipped

OPTION = "--weir-admin-key-file"
PORT = 8000
"""vLLM's default."""
MAX_KEY = 4096
"""Characters that are read of an admin key's file: no header has more."""
HELP = f"""Weir's own options, the others are vLLM's:
  {OPTION} PATH, or {ADMIN_KEY} in the environment: the key for what changes all requests
  {SAE_OPTION} NAME=PATH, repeatable: a sparse autoencoder to load; NAME=PATH@HOOK.LAYER if its files do not say where
  it belongs
  {hooks.OPTION} NAME=MODULE:ATTRIBUTE, repeatable: a weir.Hook or a function of (rows, ctx), for requests to name
  {lenses.OPTION} NAME=PATH, repeatable: a Jacobian or tuned lens, for requests to name
  {store.OPTION} URL: a folder or s3://BUCKET/FOLDER with names and results, shared with the other servers of the model
  {default_capture.OPTION} LAYERS: eagle3, mtp, all, or blocks: what plain requests leave in files, for draft models
  {default_capture.FOLDER_OPTION} DIR: the folder of these files; default: one that the server removes when it ends
  {warm.OPTION} on|off: whether the server warms what these name before it is ready; default: on
  {MODULES_OPTION} NAME=FILE ...: modules to register, JSON files with the fields of /v1/steering/modules/register
"""
GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)
"""Entry-point groups whose plugins vLLM loads unless ``VLLM_PLUGINS`` names some."""


def serve(arguments: list[str]) -> None:
    """Run ``vllm serve`` with these arguments in this process; raise WeirError if the server would run without Weir."""
    rest = prepare(arguments, os.environ)
    _check_loading()
    _check_port(rest)
    check_given(rest)
    hooks.check_given()
    from vllm_weir.patches.serve_command import vllm_serve

    # vLLM kills its API-server processes when there are several. Runs after what this process
    # itself clears up.
    atexit.register(clear, os.getpid(), ServerLimits.load().directory)
    if asks_for_help(rest):
        print(HELP)
    vllm_serve(rest)


def prepare(arguments: list[str], environ: MutableMapping[str, str]) -> list[str]:
    """Remove Weir's own options from the arguments and set the environment; return vLLM's arguments.

    Raises WeirError if the arguments or the environment would keep Weir out of the server.
    """
    if disabled(environ):
        raise WeirError("is set, so Weir is off; unset it, or use `vllm serve`", "WEIR_DISABLE")
    if environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise WeirError("is set: that frontend runs no plugins; unset it", "VLLM_USE_RUST_FRONTEND")
    rest, files = take(OPTION, arguments, "a path")
    rest, on_command_line = take("--weir-admin-key", rest, "a key")
    if on_command_line:
        raise WeirError(
            f"every user of the machine can read a command line; put the key into {ADMIN_KEY}, or name a file that "
            f"holds it with {OPTION}",
            "--weir-admin-key",
        )
    rest, saes = take(SAE_OPTION, rest, "name=path")
    rest, models = take("--model", rest, "a model")
    rest = put_shipped([*models, *rest], saes, environ)
    put_options(saes, environ)
    rest, functions = take(hooks.OPTION, rest, "name=module:attribute")
    hooks.put_options(functions, environ)
    rest, named = take(lenses.OPTION, rest, "name=path")
    lenses.put_options(named, environ)
    rest, stores = take(store.OPTION, rest, "a URL")
    store.put_option(stores, environ)
    rest, layers = take(default_capture.OPTION, rest, "blocks")
    rest, folders = take(default_capture.FOLDER_OPTION, rest, "a folder")
    default_capture.put_option(layers, folders, environ)
    rest, warms = take(warm.OPTION, rest, "on or off")
    warm.put_option(warms, environ)
    rest, modules = take(MODULES_OPTION, rest, "name=file", several=True)
    put_modules(modules, environ)
    for file in files:
        environ[ADMIN_KEY] = _key_in(file)
    if not fits_header(environ.get(ADMIN_KEY, "")):
        raise WeirError("is a line of text, without blanks or a line break around it, which no header has", ADMIN_KEY)
    ServerLimits.load(environ)
    plugins = environ.get("VLLM_PLUGINS")
    if plugins is None:
        environ["VLLM_PLUGINS"] = ",".join(all_plugins())
    elif "weir" not in plugins.split(","):
        raise WeirError(f"is {plugins!r} and leaves Weir out; add weir, or unset it", "VLLM_PLUGINS")
    return rest


def _key_in(path: str) -> str:
    """Return the line that a file holds; it may be a pipe."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_KEY + 1)
    except (OSError, UnicodeDecodeError) as e:
        raise WeirError(f"{brief(path)!r} cannot be read: {e}", OPTION) from None
    key = text.removesuffix("\n").removesuffix("\r")
    if not key or len(text) > MAX_KEY:
        raise WeirError(f"{brief(path)!r} is to hold one line with the key, of at most {MAX_KEY} characters", OPTION)
    return key


def _check_loading() -> None:
    try:
        load_route_modules()
    except Exception as e:
        raise WeirError(refuse.cause_of(e)) from e


def _check_port(arguments: list[str]) -> None:
    """Refuse a port that is in use, which vLLM would find out once it has read its configuration."""
    options = model_in(arguments)[1]
    try:
        host, port = options.get("host") or "", int(options.get("port", PORT))
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (ValueError, socket.gaierror):
        return  # vLLM will say it
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            raise WeirError(f"{port} is in use; stop what uses it, or choose another", "--port") from None


def asks_for_help(arguments: list[str]) -> bool:
    """Return whether vLLM will print its help, for which it also takes ``--help=section``."""
    return any(argument in ("-h", "--help") or argument.startswith("--help=") for argument in arguments)


def all_plugins() -> list[str]:
    """Return every plugin that vLLM would load by itself, and Weir.

    ``VLLM_PLUGINS`` switches off plugins that it does not name.
    """
    names = dict.fromkeys(entry.name for group in GROUPS for entry in entry_points(group=group))
    return list(names | {"weir": None})
