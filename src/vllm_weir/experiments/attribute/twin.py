"""`Twin`: a transformers model that is read, differentiated and patched at Weir's hook points."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_weir.errors import WeirError, brief
from vllm_weir.experiments.attribute.gradient_checks import check_complete, check_stream
from vllm_weir.schema.hooks import Site
from vllm_weir.transformers_points import Anchor, find_points, pick

OnTensor = Callable[[Site, torch.Tensor], None]
"""Called with the live tensor that a site's rows are in, [1, tokens, width] or [tokens, width]."""


@dataclass(frozen=True)
class RowPatch:
    """Rows to put in."""

    site: Site  # where
    position: int  # of the token
    row: torch.Tensor  # [...], as the site's rows are, or [d_head] for one head
    head: int | None = None  # which head; None for the whole row


@dataclass(frozen=True)
class Derivatives:
    """What one differentiated run gives."""

    metric: float  # its value
    rows: dict[Site, torch.Tensor]  # site -> [tokens, ...], detached
    gradients: dict[Site, torch.Tensor]  # site -> d metric / d row, likewise


class Twin:
    """A causal language model of transformers, in float32.

    Args:
        network: the model; it is given back as it was after every run.

    Attributes:
        num_layers: blocks.
        width: of the stream.
        name: of its class.
    """

    def __init__(self, network: Any) -> None:
        self.network, self.name = network, type(network).__name__
        dtypes = {parameter.dtype for parameter in network.parameters()}
        if dtypes != {torch.float32}:
            listed = ", ".join(sorted(map(str, dtypes)))
            raise WeirError(f"the twin computes in float32, and this is {listed}; load it with that dtype", "model")
        with _frozen(network):
            self._tree, self._sites = find_points(network)
        self.num_layers, self.width = self._tree.num_layers, self._tree.width
        self._first, self._last = Site("resid_pre", 0), Site("resid_post", self.num_layers - 1)
        for site in (self._first, self._last):
            self.require(site, "model")

    @classmethod
    def load(cls, path: str, device: Any = None, **options: Any) -> Twin:
        """Load a checkpoint in float32, with eager attention; `options` are those of ``from_pretrained``."""
        from transformers import AutoModelForCausalLM

        try:
            torch.empty(0, device=device or "cpu")
        except (AssertionError, RuntimeError, TypeError) as e:
            reason = str(e).splitlines()[0][:120]
            raise WeirError(f"torch cannot use {brief(device)}: {reason}", "device") from None
        try:
            network = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation="eager", **options
            )
        except (OSError, ValueError, KeyError, ImportError, RuntimeError) as e:
            raise WeirError(f"transformers cannot load {path!r}: {str(e)[:300]}", "model") from e
        return cls(network.to(device or "cpu"))

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @property
    def vocab_size(self) -> int:
        return int(self.network.config.get_text_config().vocab_size)

    def require(self, site: Site, field: str = "hooks") -> Anchor:
        """Return where a site is; raise WeirError with the reason if it was not found."""
        anchor = self._sites.anchors.get(site)
        if anchor is None:
            why = self._sites.refused.get(site, "it was not found")
            raise WeirError(f"{site} is not served on the transformers twin, {self.name}: {why}", field)
        if site in self._sites.read_only:
            raise WeirError(f"{site} cannot be patched on the twin: {self._sites.read_only[site]}", field)
        if anchor.residual is not None or anchor.added_term is not None or anchor.offset is not None:
            raise WeirError(f"{site} is a sum of two tensors on the twin, {self.name}: {anchor}", field)
        return anchor

    def shape(self, site: Site) -> tuple[int, ...]:
        return tuple(self._sites.shapes.get(site, (self.width,)))

    def rows(self, ids: Sequence[int], sites: Iterable[Site]) -> dict[Site, torch.Tensor]:
        """Return the rows of a prompt, site -> [tokens, ...]."""
        found: dict[Site, torch.Tensor] = {}

        def keep(site: Site, tensor: torch.Tensor) -> None:
            found[site] = self.require(site).scale * self._shaped(site, tensor.detach())

        with torch.no_grad(), _frozen(self.network), self._at(sites, keep):
            self._forward(self._batch(ids))
        return {site: self._found(found, site) for site in sites}

    def logits(self, ids: Sequence[int], patches: Sequence[RowPatch] = ()) -> torch.Tensor:
        """Return the logits [vocabulary] that follow a prompt, with rows put in."""

        def write(site: Site, tensor: torch.Tensor) -> None:
            for patch in patches:
                if patch.site == site:
                    row = self._view_of(site, tensor)[patch.position]
                    whole = row if patch.head is None else row.view(self.shape(site))[patch.head]
                    whole.copy_(patch.row.reshape(whole.shape).to(whole) / self.require(site).scale)

        with torch.no_grad(), _frozen(self.network), self._at({patch.site for patch in patches}, write):
            return self._forward(self._batch(ids))[0, -1]

    def finish(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, vocabulary] of rows [n, d] that left the last block."""
        rows = rows.to(self.device, torch.float32)

        def write(site: Site, tensor: torch.Tensor) -> None:
            tensor.view(rows.shape).copy_(rows)

        ids = torch.zeros(len(rows), 1, dtype=torch.long, device=self.device)
        with torch.no_grad(), _frozen(self.network), self._at([self._last], write):
            return self._forward(ids)[:, -1]

    @contextlib.contextmanager
    def unembedding(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """Yield what turns rows [n, width] that left the last block into logits [n, vocabulary].

        It can be differentiated. All blocks but the last pass their input on meanwhile.
        """
        blocks = [block for layer, block in self._tree.blocks.items() if layer < self.num_layers - 1]
        given: list[torch.Tensor] = []

        def write(_site: Site, tensor: torch.Tensor) -> None:
            tensor.copy_(given[-1].view(tensor.shape))

        def logits(rows: torch.Tensor) -> torch.Tensor:
            given[:] = [rows]
            return self._forward(torch.zeros(len(rows), 1, dtype=torch.long, device=self.device))[:, -1]

        with _frozen(self.network), _passing_on(self.network, blocks), self._at([self._last], write):
            yield logits

    def differentiate(
        self, ids: Sequence[int], metric: Callable[[torch.Tensor], torch.Tensor], sites: Sequence[Site]
    ) -> Derivatives:
        """Return the rows of a prompt and the metric's gradients with respect to them."""
        checked = {*sites, *self._stream_sites(sites)}
        with self.graph(ids, checked) as (logits, live):
            value = _value_of(metric, logits[-1])
            present = [site for site in checked if live[site].requires_grad]
            gradients = torch.autograd.grad(value, [live[site] for site in present], allow_unused=True)
        given = dict(zip(present, gradients, strict=True))
        rows, slopes = {}, {}
        for site in checked:
            gradient = given.get(site)
            gradient = torch.zeros_like(live[site]) if gradient is None else gradient
            scale = self.require(site).scale
            rows[site] = scale * self._shaped(site, live[site].detach())
            slopes[site] = self._shaped(site, gradient) / scale
        check_stream(rows, slopes, self.num_layers)
        return Derivatives(float(value.detach()), {s: rows[s] for s in sites}, {s: slopes[s] for s in sites})

    def slope_at(
        self, ids: Sequence[int], metric: Callable[[torch.Tensor], torch.Tensor], site: Site,
        positions: Sequence[int], rows: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Return the metric's gradient [tokens, ...] with respect to a site's rows, where some of them are put in.

        `differentiate` says whether such a gradient leaves out a part of the model.

        Args:
            ids: the prompt.
            metric: of the logits that follow it.
            site: where.
            positions: of the rows that are put in.
            rows: [positions, ...].
        """
        scale, live = self.require(site).scale, []

        def write(site: Site, tensor: torch.Tensor) -> None:
            view = self._view_of(site, tensor)
            view[list(positions)] = (rows.reshape(len(positions), -1) / scale).to(view)
            live.append(tensor.requires_grad_(True))  # nothing before it is differentiated

        with torch.enable_grad(), _frozen(self.network), self._at([site], write):
            value = _value_of(metric, self._forward(self._batch(ids))[0, -1])
            (gradient,) = torch.autograd.grad(value, live)
        return self._shaped(site, gradient) / scale

    @contextlib.contextmanager
    def graph(
        self, ids: Sequence[int], sites: Iterable[Site]
    ) -> Iterator[tuple[torch.Tensor, dict[Site, torch.Tensor]]]:
        """Yield the logits [tokens, vocabulary] of a prompt and the tensors of sites that they are computed from."""
        live: dict[Site, torch.Tensor] = {}
        versions: dict[Site, int] = {}

        def keep(site: Site, tensor: torch.Tensor) -> None:
            if site == self._first:
                tensor.requires_grad_(True)
            live[site], versions[site] = tensor, tensor._version

        wanted = [self._first, *sites]
        with (
            torch.enable_grad(),
            _frozen(self.network),
            check_complete(self._tree, live),
            self._at(wanted, keep),
        ):
            logits = self._forward(self._batch(ids))[0]
            for site in wanted:
                if self._found(live, site)._version != versions[site]:
                    raise WeirError(f"the twin overwrites {site} in place, so it has no gradient there", "hooks")
            yield logits, live

    def jacobians(
        self, ids: Sequence[int], layers: Sequence[int], first: int, last: int, batch: int
    ) -> dict[int, torch.Tensor]:
        """Return the mean Jacobians of what leaves the last block with respect to what leaves others.

        Row i of a block's matrix is the gradient of the sum of value i over target positions, averaged over source
        positions; targets before a source have no part in its gradient.

        Args:
            ids: the prompt.
            layers: blocks before the last.
            first: the first source and target position.
            last: the last one.
            batch: rows that are computed at a time.

        Returns:
            block -> float32 [width, width].
        """
        sites = [Site("resid_post", layer) for layer in layers]
        found = {layer: torch.zeros(self.width, self.width, device=self.device) for layer in layers}
        with self.graph(ids, [*sites, self._last]) as (_, live):
            final, inputs = live[self._last], [live[site] for site in sites]
            for start in range(0, self.width, batch):
                count = min(batch, self.width - start)
                chosen = torch.zeros(count, len(ids), self.width, device=self.device)
                chosen[torch.arange(count), first : last + 1, start + torch.arange(count)] = 1.0
                gradients = torch.autograd.grad(
                    final, inputs, chosen.view(count, *final.shape), retain_graph=True, is_grads_batched=True
                )
                for site, gradient in zip(sites, gradients, strict=True):
                    rows = gradient.reshape(count, len(ids), self.width)[:, first : last + 1].mean(1)
                    found[site.layer][start : start + count] = rows
        final_scale = self.require(self._last).scale
        return {site.layer: found[site.layer] * (final_scale / self.require(site).scale) for site in sites}

    def _stream_sites(self, sites: Iterable[Site]) -> set[Site]:
        hooks = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
        wanted = {Site(hook, site.layer) for site in sites if site.hook in hooks for hook in hooks}
        wanted |= {Site("resid_pre", site.layer + 1) for site in sites if site.layer + 1 < self.num_layers}
        return {site for site in wanted if site in self._sites.anchors}

    def _batch(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(ids)], device=self.device)

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.network(input_ids=ids, use_cache=False).logits

    @contextlib.contextmanager
    def _at(self, sites: Iterable[Site], on_tensor: OnTensor) -> Iterator[None]:
        """Call `on_tensor` whenever the rows of one of the sites pass."""
        handles = []
        try:
            for site in dict.fromkeys(sites):
                handles.append(self._hook(site, self.require(site), on_tensor))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, site: Site, anchor: Anchor, on_tensor: OnTensor) -> Any:
        def before(_module: Any, args: tuple, kwargs: Mapping[str, Any]) -> None:
            on_tensor(site, pick(anchor.hidden, args, kwargs, None))

        def after(_module: Any, args: tuple, kwargs: Mapping[str, Any], output: Any) -> None:
            on_tensor(site, pick(anchor.hidden, args, kwargs, output))

        module = self._tree.modules[anchor.module]
        if anchor.when == "before":
            return module.register_forward_pre_hook(before, with_kwargs=True)
        return module.register_forward_hook(after, with_kwargs=True)

    def _view_of(self, site: Site, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view [tokens, width] of the memory that a site's rows are in."""
        columns = self.require(site).columns or (0, tensor.shape[-1])
        return tensor.view(-1, tensor.shape[-1])[:, columns[0] : columns[1]]

    def _shaped(self, site: Site, tensor: torch.Tensor) -> torch.Tensor:
        """Return what of a tensor belongs to a site, [tokens, ...]."""
        columns = self.require(site).columns or (0, tensor.shape[-1])
        rows = tensor.reshape(-1, tensor.shape[-1])[:, columns[0] : columns[1]]
        return rows.reshape(len(rows), *self.shape(site))

    def _found(self, found: Mapping[Site, torch.Tensor], site: Site) -> torch.Tensor:
        if site not in found:
            raise WeirError(f"the twin, {self.name}, did not pass {site} in this run", "hooks")
        return found[site]


def _value_of(metric: Callable[[torch.Tensor], torch.Tensor], logits: torch.Tensor) -> torch.Tensor:
    """Return what a metric makes of logits [vocabulary]: one number that can be differentiated."""
    value = metric(logits)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        what = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise WeirError(f"the metric returned {what}; attribution needs a tensor of one number", "metric")
    if not value.requires_grad:
        raise WeirError(
            "the metric's value does not depend on the logits in a way that torch can differentiate; compute it from "
            "the tensor that it is given",
            "metric",
        )
    return value.reshape(())


@contextlib.contextmanager
def _passing_on(network: Any, blocks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Have blocks return the rows that they are given, in the form in which they return rows."""
    forms: dict[torch.nn.Module, Any] = {}
    handles = [block.register_forward_hook(lambda module, _args, output: forms.update({module: output}))
               for block in blocks]  # fmt: skip
    try:
        with torch.no_grad():
            network(input_ids=torch.zeros(1, 1, dtype=torch.long, device=next(network.parameters()).device))
    finally:
        for handle in handles:
            handle.remove()

    def passes(form: Any) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            rows = args[0] if args else kwargs["hidden_states"]
            return (rows, *form[1:]) if isinstance(form, tuple) else rows

        return forward

    try:
        for block in blocks:
            block.forward = passes(forms[block])
        yield
    finally:
        for block in blocks:
            vars(block).pop("forward", None)


@contextlib.contextmanager
def _frozen(network: Any) -> Iterator[None]:
    """Put a model into evaluation mode without gradients of its parameters, and restore it."""
    training = [module for module in network.modules() if module.training]
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    network.eval()
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for module in training:
            module.training = True
