"""``--weir-default-capture LAYERS``: plain requests leave rows in files, as with vLLM's connector of hidden states.

Trainers of draft models send a completion or a chat and read ``kv_transfer_params["hidden_states_path"]`` of the
answer: a file as `compat.hidden_states` describes it, named by the request, with an unlocked ``.lock`` beside it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

from vllm_weir.errors import WeirError, brief
from vllm_weir.frontend.outputs.view import OutputView
from vllm_weir.schema.compression import Compression
from vllm_weir.schema.draft_layers import DRAFT_LAYERS, draft_layers
from vllm_weir.schema.keys import WIRE_KEY
from vllm_weir.schema.request import WIRE_VERSION
from vllm_weir.server.limits import DEFAULT_CAPTURE as VARIABLE
from vllm_weir.server.request import WeirRequest
from vllm_weir.server.state import ServerState
from vllm_weir.storage.batch import Batch, pack
from vllm_weir.storage.layouts.per_request import file_of, publish_states
from vllm_weir.storage.layouts.site_tensors import join_sites
from vllm_weir.storage.object_store import ObjectStore

OPTION, FOLDER_OPTION = "--weir-default-capture", "--weir-default-capture-dir"
FOLDER = "hidden_states"
"""Below the server's own directory, where files lie if the operator names no folder."""
PARAMS, PATH, WITH_OUTPUT = "kv_transfer_params", "hidden_states_path", "include_output_tokens"
"""vLLM's field of requests and answers, and its keys: the file, and whether it has generated tokens, too."""
OPT_OUT = f'this server captures plain requests ({OPTION}); or send "{WIRE_KEY}": {{"v": {WIRE_VERSION}}} for no file'


def put_option(layers: list[str], folders: list[str], environ: MutableMapping[str, str]) -> None:
    """Put both options into the environment; raise WeirError naming the one that is wrong."""
    for option, values in ((OPTION, layers), (FOLDER_OPTION, folders)):
        if len(values) > 1:
            raise WeirError("is given twice", option)
    if not layers:
        if folders:
            raise WeirError(f"says where files go; {OPTION} LAYERS says of which blocks", FOLDER_OPTION)
        return
    folder = _checked_folder(folders[0]) if folders else ""
    environ[VARIABLE] = json.dumps({"layers": _parse(layers[0]), "folder": folder})


def _parse(text: str) -> list[int] | str:
    if text in ("all", *DRAFT_LAYERS):
        return text
    layers = [int(part) if part.strip().isdecimal() else -1 for part in text.split(",")]
    if min(layers) < 0 or len(set(layers)) < len(layers):
        raise WeirError(
            f"expected {', '.join(DRAFT_LAYERS)}, all, or different blocks such as 1,15,28,31, got {brief(text)!r}",
            OPTION,
        )
    return sorted(layers)


def _checked_folder(text: str) -> str:
    folder = os.path.abspath(text)
    try:
        if "://" in text:
            raise OSError("an answer names a local file, so it is a folder of this machine")
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OSError("it cannot be written")
    except OSError as e:
        raise WeirError(f"{brief(text, 200)!r}: {e}", FOLDER_OPTION) from None
    return folder


async def load_given(state: ServerState, environ: Mapping[str, str] = os.environ) -> None:
    """Have plain requests captured from now on; raise WeirError if the engine cannot do what the option says."""
    if not environ.get(VARIABLE):
        return
    given = json.loads(environ[VARIABLE])
    layers, blocks = given["layers"], (await state.capabilities()).num_layers
    if layers in DRAFT_LAYERS:
        layers = list(draft_layers(layers, blocks, OPTION))
    folder = given["folder"]
    if not folder:
        assert state.directory is not None, "opened before anything is loaded"
        folder = str(state.directory.subdirectory(FOLDER))
    capture = DefaultCapture(layers, folder)
    try:
        state.frontend.warm_up_lengths(capture.extra_args(), 1)
    except WeirError as e:
        raise WeirError(e.message, OPTION) from None
    state.by_default = capture


class DefaultCapture:
    """What a server captures of plain requests, and the folder of their files.

    Args:
        layers: blocks, or ``"all"``.
        folder: an absolute path.
    """

    def __init__(self, layers: list[int] | str, folder: str) -> None:
        self._layers = layers
        self._store = ObjectStore(folder)
        self._store.make_folder()
        self._store.sweep()

    def extra_args(self, positions: str = "prompt") -> dict[str, Any]:
        """Return what is captured, as a request would ask for it."""
        capture = {"hook": "resid_post", "layers": self._layers, "positions": positions}
        return {WIRE_KEY: {"v": WIRE_VERSION, "capture": [capture]}}

    def request(self, body: Any) -> WeirRequest:
        """Return what vLLM's request, which has no key of Weir's, asks by default.

        Raises:
            WeirError: if one file cannot hold it, naming vLLM's field.
        """
        prompt, params = getattr(body, "prompt", None), body.kv_transfer_params or {}
        if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
            raise WeirError(f"an answer names one file; send {len(prompt)} requests: {OPT_OUT}", "prompt")
        if getattr(body, "prompt_embeds", None) is not None:
            raise WeirError(f"a file says the prompt's tokens; send them as prompt: {OPT_OUT}", "prompt_embeds")
        if body.use_beam_search:
            raise WeirError(f"what beams have is in no file; leave it out: {OPT_OUT}", "use_beam_search")
        if (body.n or 1) > 1:
            raise WeirError(f"an answer names one file; leave it out: {OPT_OUT}", "n")
        if params.get(PATH) is not None:
            raise WeirError("the server names the file; leave it out, and read the answer's", f"{PARAMS}.{PATH}")
        positions = "all" if params.get(WITH_OUTPUT) else "prompt"
        return WeirRequest(self.extra_args(positions), inline_bytes=0, deposit=self.write)

    def write(self, view: OutputView) -> tuple[dict[str, Any], Callable[[], None]]:
        """Write a finished sequence's file; return the answer's fields, and what deletes the file.

        Raises:
            WeirError: if rows were lost, or the file cannot be written.
        """
        acts, request_id = view.activations(), view.pending.request_id
        batches = [
            Batch(request_id, *site, acts.positions_of(*site).numpy(), acts.token_ids_of(*site).numpy(), acts[site])
            for site in acts.sites
        ]
        name = file_of(request_id)
        path = self._store.path(name)
        with self._store.store_errors("write", f"{name}.lock"), open(f"{path}.lock", "wb"):
            pass  # vLLM's own reader opens it, and waits while its writer holds it
        try:
            publish_states(self._store, name, request_id, join_sites([pack(one, Compression()) for one in batches]))
        except Exception:
            _delete(path)
            raise
        return {PARAMS: {PATH: path}}, lambda: _delete(path)


def _delete(path: str) -> None:
    for name in (path, f"{path}.lock"):
        with suppress(OSError):  # the client may have taken it
            os.unlink(name)
