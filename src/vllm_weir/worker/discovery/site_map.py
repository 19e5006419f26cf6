"""Which sites a model has and where they are, and its path from the last block to the output."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from vllm_weir.config.settings import Settings
from vllm_weir.errors import WeirError
from vllm_weir.schema.hooks import BLOCK_HOOKS, HOOKS, MODEL_HOOKS, SOURCE_HOOKS, Site, place_of
from vllm_weir.schema.model_facts import ModelFacts
from vllm_weir.schema.rows import RowShape, Shard
from vllm_weir.schema.taps import tap_of
from vllm_weir.worker.discovery.anchors import Anchor, ModuleCall, TensorKey, Trace
from vllm_weir.worker.discovery.matcher import Matcher
from vllm_weir.worker.tap.routing import FoundRouters

# The way of a row from the last block to what the model returns, as a lens takes it for rows of any block.
#
# Models differ in what they do there: a norm (most), a projection behind it (OPT), a division (MiniCPM), nothing at all
# (MiMo, which norms where it computes logits). So the way is found in a pass with noise, in which a tensor that is
# equal to another, or a multiple of it, was made from it.


@dataclass(frozen=True)
class Link:
    """A module on the way."""

    module: str  # path from the model
    scale: float  # it is given so many times the tensor before it
    result: TensorKey  # which tensor of its output goes on


@dataclass(frozen=True, eq=False)
class OutputPath:
    """What a model does with the stream behind its last block."""

    links: tuple[Link, ...]  # modules, each called with one tensor alone
    scale: float  # the model returns so many times what leaves the last of them
    stream: torch.Tensor  # what left the last block in a pass with the model's own weights, float32 [tokens, d]
    output: torch.Tensor  # what the model returned in that pass, float32 [tokens, any width]


def find_links(
    trace: Trace, matcher: Matcher, tensor: torch.Tensor, time: int
) -> tuple[tuple[Link, ...], float] | None:
    """Return the links from a tensor to what the model returned, and the last factor; None if they are not found.

    `tensor` is [tokens, width], and is there since `time` of the noise pass `trace`.
    """
    if trace.model_output is None:
        return None
    scale = matcher.factor(tensor, trace.model_output)
    if scale is not None:
        return (), scale
    # By their ends, parts come before the modules that they are parts of, which may do more than they are seen to do.
    for call in sorted((call for call in trace.outside if call.start > time), key=lambda call: call.end):
        given = given_times(call, tensor, matcher)
        if given is None:
            continue
        for key, value in _results(call).items():
            # What passes it on as it is (a dropout, a norm's second result) is no link.
            rest = None if matcher.same(value, tensor) else find_links(trace, matcher, value, call.end)
            if rest is not None:
                return (Link(call.path, given, key), *rest[0]), rest[1]
    return None


def _results(call: ModuleCall) -> dict[TensorKey, torch.Tensor]:
    return call.outputs | {key: value for key, value in call.other_widths.items() if key.kind == "out"}


def given_times(call: ModuleCall, tensor: torch.Tensor, matcher: Matcher) -> float | None:
    """Return how many times a tensor a call is given, alone or as the sum of two arguments; None if it is not."""
    given = [*call.args.values(), *(value for key, value in call.other_widths.items() if key.kind == "arg")]
    if len(given) == 2 and given[0].shape == given[1].shape and matcher.same(given[0] + given[1], tensor):
        return 1.0
    return next((scale for one in given if (scale := matcher.factor(tensor, one)) is not None), None)


UNTAPPED = "it is not tapped by this engine; start it with 'hooks' / 'layers' settings that include it"
UNDOES_FUSION = (
    "a tap there would undo vLLM's fusion of a norm or an activation with quantisation in a quantised model; "
    "start the engine with 'hooks' settings that include it"
)


@dataclass
class SiteMap:
    """Verdicts on every site of the blocks that live in this process."""

    num_layers: int  # blocks of the whole model
    # site -> where it is. Under pipeline parallelism the stage before serves `resid_pre` of a stage's first block.
    anchors: dict[Site, Anchor] = field(default_factory=dict)
    refused: dict[Site, str] = field(default_factory=dict)  # site -> why it is not supported
    # site -> shape of a row of the whole model; left out where that is (d_model,)
    shapes: dict[Site, RowShape] = field(default_factory=dict)
    # site -> the part of its row that this worker's tensors hold; left out where they hold all of it
    shards: dict[Site, Shard] = field(default_factory=dict)
    # site -> why it is read and not written, for sites that this model alone restricts (`schema.hooks.READ_ONLY_HOOKS`
    # are read-only in every model)
    read_only: dict[Site, str] = field(default_factory=dict)
    # sites whose values vLLM may quantise in one kernel with what makes them, which a tap would undo
    before_quantised: set[Site] = field(default_factory=set)
    # returns those of the attention and MoE layers, for sites that are derived; some follow from weights, which may be
    # replaced
    read_facts: Callable[[], ModelFacts] = ModelFacts
    # whether `embed` is read off the embeddings that the model is given instead of tokens, among which are those of
    # images
    embeddings_given: bool = False
    # the way of rows from the last block to what the model returns; None if it was not found
    output_path: OutputPath | None = None
    # those of MoE layers, whose choices are read in one row
    routers: FoundRouters = field(default_factory=FoundRouters)

    def refuse(self, hooks: Iterable[str], layers: Iterable[int], why: str) -> None:
        """Refuse these hook points of these layers; the first reason that is given stays."""
        for layer in layers:
            for hook in hooks:
                self.anchors.pop(Site(hook, layer), None)
                self.refused.setdefault(Site(hook, layer), why)

    def why_left_out(self, site: Site, settings: Settings) -> str:
        """Return why the settings do not ask for a site that the model has; "" if they do."""
        if settings.hooks is None and site in self.before_quantised:
            return UNDOES_FUSION
        hooks, layers = settings.hooks or HOOKS, settings.layers
        if site in _wanted(hooks, range(self.num_layers) if layers == "all" else layers):
            return ""
        return UNTAPPED


def chosen(sites: SiteMap, settings: Settings) -> dict[int, Anchor]:
    """Return the taps that the settings ask for and the model has here.

    A block's `resid_pre` shares a tap with `resid_post` of the block before, placed at the latter.

    Returned: tap number -> anchor, in the order in which taps at one place have to act. Raises WeirError if a layer
    does not exist. With ``refused="start"`` also if a hook point that the settings name is refused in a layer, or all
    sites are refused.
    """
    layers = range(sites.num_layers) if settings.layers == "all" else settings.layers
    for layer in layers:
        if layer >= sites.num_layers:
            raise WeirError(
                f"block {layer} does not exist: the model has blocks 0..{sites.num_layers - 1}", "settings.layers"
            )
    wanted = _wanted(settings.hooks or HOOKS, layers)
    if settings.hooks is None:
        wanted -= sites.before_quantised
    if settings.refused == "start":
        _raise_if_refused(sites, wanted if settings.hooks is not None else set())
    anchors: dict[int, Anchor] = {}
    for site in sorted(wanted, key=place_of):
        source = site
        if site.hook == "resid_pre" and Site("resid_post", site.layer - 1) in sites.anchors:
            source = Site("resid_post", site.layer - 1)
        if site in sites.anchors and source in sites.anchors:
            anchors.setdefault(tap_of(site), sites.anchors[source])
    # The final norm's tap (1) comes last.
    return dict(sorted(anchors.items(), key=lambda item: (item[0] == 1, item[0])))


def _wanted(hooks: Iterable[str], layers: Iterable[int]) -> set[Site]:
    """Return the sites of hook points and layers, with those from which derived ones are computed.

    resid_post of block 0 brings its resid_pre.
    """
    hooks = {tapped for hook in hooks for tapped in (hook, *SOURCE_HOOKS.get(hook, ()))}
    wanted = {Site(hook, layer) for hook in hooks if hook in BLOCK_HOOKS for layer in layers}
    wanted |= {Site(hook, 0) for hook in hooks if hook in MODEL_HOOKS}
    if Site("resid_post", 0) in wanted:
        wanted.add(Site("resid_pre", 0))
    return wanted


def _raise_if_refused(sites: SiteMap, named: set[Site]) -> None:
    for site in sorted(named & sites.refused.keys(), key=place_of):
        raise WeirError(f"{site} is refused: {sites.refused[site]}", "settings.hooks")
    if sites.refused and not sites.anchors:
        site, why = next(iter(sites.refused.items()))
        raise WeirError(f"every site is refused; {site}: {why}", "settings.refused")
