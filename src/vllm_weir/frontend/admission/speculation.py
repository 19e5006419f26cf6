"""What cannot be done exactly while drafts are verified: several tokens of a sequence in one pass."""

from __future__ import annotations

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.admitted import AdmittedRequest
from vllm_weir.schema.engine_traits import EngineTraits


def check_drafts_ahead(admitted: AdmittedRequest, prompt_len: int, traits: EngineTraits) -> None:
    """Raise WeirError if what is done to a token needs both its position and its id, which only the device knows."""
    if not traits.uncertainty:
        return
    selectors = {step.positions for step in admitted.steps}
    if not any(selector.needs_token_ids for selector in selectors):
        return
    steady = [selector.steady(prompt_len) for selector in selectors]
    if any(step.per_position for step in admitted.steps) or any(one is None or one[0] > prompt_len for one in steady):
        raise WeirError(
            "beside a selector by token, selectors that end or begin among the generated tokens cannot be told apart "
            "while drafts are verified: use 'all', 'prompt' or 'generated' beside it, or start the engine with "
            "async_scheduling=False",
            "interventions" if admitted.effective else "probes",
        )
