"""The part of an admitted request that travels to the scheduler and the workers.

The engine frontend puts an `EngineRequest` into the request's ``extra_args``, or a pooling
request's ``extra_kwargs``. vLLM's msgpack encoder writes it as an array, and a pickle between the
engine core and its workers keeps it as it is, so the receiving side has an array or an
`EngineRequest`; `EngineRequest.carried_by` reads both.
"""

from __future__ import annotations

from typing import Any

import msgspec

from vllm_weir.schema.keys import WIRE_KEY

NOT_LOADED_IN_CORE = "it was not loaded there; the log says why"


class TableNeeds(msgspec.Struct, array_like=True, frozen=True):
    """Upper bounds on what a request's interventions and probes take of the device tables.

    Attributes:
        vectors: digests of the vectors that they use, sorted.
        programs: rows of the program table.
        instructions: rows of the instruction table.
        wide: digest -> rows of the table of vectors, for vectors that take more than one.
        probes: rows of the table of probes.
        gates: rows of the table of gates.
        states: numbers that its probes and gates keep.
    """

    vectors: list[str]
    programs: int
    instructions: int
    wide: dict[str, int] = {}
    probes: int = 0
    gates: int = 0
    states: int = 0


class EngineRequest(msgspec.Struct, array_like=True):
    """What one sequence's request asks of the scheduler and the workers.

    Attributes:
        spec: `EngineSpec.wire`: the captures and interventions.
        reader_endpoint: the address at which the request's reader listens.
        first_position: the first wanted position, or None if no position is known to be wanted.
        rows_per_token: the most rows that one token can give; 0 if the request captures nothing.
        rows_per_tap: the most rows that one token can give at one tap.
        max_row_tokens: how many tokens give rows that leave the device unreduced; None if that is
            not bounded.
        rows_per_group: ring rows of one group of tokens whose rows are reduced; 0 if none are.
        last_reduced: the last position whose row is reduced; None if none are.
        max_tokens: how many tokens the request can generate.
        table_needs: what interventions and probes need of the device tables; None if there are
            neither.
        vectors: float32 bytes, by digest, of the vectors that travel with the request.
        cache_salt: see `RowStore.salt`; empty until a request of this caller has failed.
        core_refusal: why the engine core does not do its part; empty if it does. None until the
            engine core has taken the request, and for good where Weir is not loaded there.
        prompt_len: how many of the first tokens that the engine is given are the prompt; those after
            them count as generated. None: all are the prompt.
        calls: the users' functions that are called for it, `user_hooks.Call` by key.
        own_from: the first position whose keys and values may depend on what is done after its block,
            so that no other request can share them; None if there is none.
    """

    spec: bytes
    reader_endpoint: str
    first_position: int | None = None
    rows_per_token: int = 0
    rows_per_tap: int = 0
    max_row_tokens: int | None = None
    rows_per_group: int = 0
    last_reduced: int | None = None
    max_tokens: int = 0
    table_needs: TableNeeds | None = None
    vectors: dict[str, bytes] = {}
    cache_salt: str = ""
    core_refusal: str | None = None
    prompt_len: int | None = None
    own_from: int | None = None
    calls: dict[str, bytes] = {}

    @classmethod
    def carried_by(cls, extra_args: dict[str, Any] | None) -> EngineRequest | None:
        """Return the request in a ``SamplingParams.extra_args``, or None.

        What has arrived as an array is decoded once and replaced in `extra_args`.
        """
        carried = extra_args.get(WIRE_KEY) if extra_args else None
        if carried is None or type(carried) is cls:
            return carried
        assert extra_args is not None, "it carries something"
        decoded = extra_args[WIRE_KEY] = msgspec.convert(carried, cls)
        return decoded

    @property
    def refusal(self) -> str:
        """Why a worker must fail the request; empty if it can serve it.

        Without Weir in the engine core, other requests would hit cached blocks of a steered one,
        and rows of cached positions would be missing.
        """
        why = NOT_LOADED_IN_CORE if self.core_refusal is None else self.core_refusal
        return f"Weir does not work in the engine core: {why}" if why else ""
