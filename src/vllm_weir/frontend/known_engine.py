"""`KnownEngine`: how an engine is configured, and what its workers serve once they have reported."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_weir.config.settings import Settings
from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.admitted import AdmittedRequest
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.engine_wire import make_engine_request
from vllm_weir.frontend.admission.reachable import UNKNOWN, Vocabulary
from vllm_weir.schema.engine_spec import EngineRequest
from vllm_weir.schema.engine_traits import PLAIN_ENGINE, EngineTraits, TableSizes
from vllm_weir.schema.request import WIRE_KEY


class KnownEngine:
    """What is known of one engine.

    Attributes:
        capabilities: what the workers serve; None until they have reported.
        first_weights: fingerprint of the weights that the engine was started with, "" if they could
            not be read; None while its workers were told nothing that may replace them.
    """

    def __init__(
        self,
        settings: Settings,
        chunked: bool,
        refusal: str | None = None,
        vocabulary: Vocabulary = UNKNOWN,
        traits: EngineTraits = PLAIN_ENGINE,
    ) -> None:
        self.refusal, self.vocabulary, self.traits = refusal, vocabulary, traits
        self.capabilities: EngineCapabilities | None = None
        self.first_weights: str | None = None
        self._settings, self._chunked = settings, chunked
        self._sizes: TableSizes | None = None

    def learn(self, capabilities: EngineCapabilities) -> None:
        self.capabilities, self._sizes = capabilities, self._settings.table_sizes(capabilities.d_model)

    @property
    def knows_weights(self) -> bool:
        """Whether the workers' reports hold values of weights, so that new weights need new reports."""
        return self.refusal is None and self.capabilities is not None and self.capabilities.facts.from_weights

    def require_capabilities(self) -> EngineCapabilities:
        """Return what the engine serves; raise WeirError if it cannot serve Weir's keys."""
        if self.refusal is not None:
            raise WeirError(self.refusal, WIRE_KEY)
        if self.capabilities is None:
            why = "the workers have not reported: `await weir.sites_async(engine)` first, or see `weir doctor`"
            raise WeirError(why, WIRE_KEY)
        return self.capabilities

    def make_request(
        self,
        admitted: AdmittedRequest,
        reader_endpoint: str,
        prompt_ids: Sequence[int] | None,
        prompt_len: int,
        max_tokens: int,
        longest_item: int = 0,
    ) -> EngineRequest | None:
        """Return what travels to the engine with a request, see `make_engine_request`.

        `longest_item`: the most positions of an image or the like in its prompt.

        Raises:
            WeirError: if the engine can never hold what the request needs.
        """
        capabilities = self.require_capabilities()
        sizes = self._sizes or self._settings.table_sizes(capabilities.d_model)
        step_tokens = max(1, longest_item if self.traits.media_whole else 0) if self._chunked else prompt_len
        return make_engine_request(
            admitted, reader_endpoint, prompt_ids, prompt_len, max_tokens, capabilities, step_tokens, sizes
        )

    def check_holds(self, admitted: AdmittedRequest) -> None:
        self.make_request(admitted, "", None, 1, 1)
