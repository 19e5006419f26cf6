"""`ActivationDataset`: read activations by request, site and position, whatever they were stored as."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vllm_weir.codec import decode, project
from vllm_weir.errors import WeirError
from vllm_weir.results.activations import Activations
from vllm_weir.schema.hooks import Site, parse_site
from vllm_weir.schema.positions import Positions
from vllm_weir.storage.batch import header_text
from vllm_weir.storage.index import PLAIN, Index
from vllm_weir.storage.provenance import check_placed
from vllm_weir.storage.record_blocks import RecordBlock

if TYPE_CHECKING:
    from vllm_weir.storage.torch_dataset import RowStream


@dataclass(eq=False)
class DatasetRows:
    """Rows of one site, ordered by request (as in `ActivationDataset.requests`) and position.

    Attributes:
        rows: tensor [n, d].
        positions, token_ids: int64 [n]; token -1 where unknown.
        request_index: int64 [n], index into `requests`.
        requests: the dataset's.
    """

    rows: Tensor
    positions: Tensor
    token_ids: Tensor
    request_index: Tensor
    requests: list[str]

    def __len__(self) -> int:
        return len(self.rows)


class ActivationDataset(Mapping):
    """Activations of many requests: a mapping from request id to `Activations`. Made by `load`.

    Nothing but the index is read before it is asked for; local files are mapped into memory. May be pickled, and used
    in DataLoader workers.
    """

    def __init__(self, index: Index, url: str) -> None:
        self.index = index
        self.url = url

    @property
    def layout(self) -> str:
        """What the data are stored as."""
        return self.index.layout

    @property
    def requests(self) -> list[str]:
        """Ids of the finished requests."""
        return self.index.requests

    @property
    def incomplete(self) -> list[str]:
        """Requests that were begun and never finished."""
        return self.index.incomplete

    @property
    def sites(self) -> list[Site]:
        """The sites there are, by block and then by place in the block."""
        return self.index.sites

    @property
    def headers(self) -> list[dict[str, Any]]:
        """The distinct headers of the records."""
        return list({header_text(b.header): b.header for b in self.index.blocks}.values())

    @property
    def header(self) -> dict[str, Any]:
        """The one header; raises WeirError if there are several, see `headers`."""
        headers = self.headers
        if len(headers) != 1:
            raise WeirError(f"{self.url} has records of {len(headers)} kinds; see .headers")
        return headers[0]

    def __len__(self) -> int:
        return len(self.index.requests)

    def __iter__(self) -> Iterator[str]:
        return iter(self.index.requests)

    def __contains__(self, request: object) -> bool:
        return request in self.index.code

    def __getitem__(self, request: str) -> Activations:
        """One request's activations; a site's rows are read and decoded when they are looked at."""
        code = self._code(request)
        runs = self.index.runs_of(code)
        mine = {self.sites[s]: runs[self.index.site[runs] == s] for s in np.unique(self.index.site[runs]).tolist()}
        places = {site: self.ordered(some) for site, some in mine.items()}
        positions = {site: torch.from_numpy(self.index.positions[at]) for site, (_, at) in places.items()}
        tokens = {site: torch.from_numpy(self.index.token_ids[at]) for site, (_, at) in places.items()}
        return Activations(_LazyRows(self, mine, places), positions, tokens)  # type: ignore[arg-type]

    def metadata(self, request: str) -> dict[str, Any]:
        """What was stored with a request."""
        return self.index.describe(self._code(request))

    def count(self, site: object = None) -> int:
        """Rows of one site, or of all."""
        if site is None:
            return int(self.index.rows.sum())
        return int(self.index.rows[self.index.site == self._site(site)].sum())

    def rows(
        self, site: object, requests: Sequence[str] | str | None = None, positions: object = "all", *,
        space: str = "model",
    ) -> DatasetRows:  # fmt: skip
        """Rows of one site.

        Args:
            site: ``("resid_post", 10)``, ``"resid_post.10"`` or ``"blocks.10.hook_resid_post"``.
            requests: ids, or one; None for all; of an empty list [0, d], as wide and of the dtype as all would be.
            positions: a selector, as for `Capture`. Those that count from the prompt's end need requests whose
                metadata hold ``prompt_tokens``. Of a request whose rows are means or maxima over positions none can
                be chosen.
            space: ``"model"``: decoded, [n, d_model], float32 (uncompressed rows keep their dtype). ``"projected"``: of
                rp8 the compressed space, [n, k], for inner products.

        Raises:
            KeyError: for a site or a request that is not there.
            WeirError: if positions cannot be chosen, or the rows differ in width.
        """
        runs = self.runs_of(site, requests)
        which, at = self.ordered(runs)
        selector = Positions.parse(positions)
        if selector.kind != "all":
            check_placed(self.index, np.unique(self.index.request[which]).tolist(), parse_site(site), selector)
        chosen = self._select(which, at, selector)
        which, at = which[chosen], at[chosen]
        if not len(runs):
            runs = self.runs_of(site, None)
        return DatasetRows(
            self.read(which, at, space) if len(which) else self.no_rows(runs, space),
            torch.from_numpy(self.index.positions[at]),
            torch.from_numpy(self.index.token_ids[at]),
            torch.from_numpy(self.index.request[which]),
            self.requests,
        )

    def torch(self, site: object, **options: Any) -> RowStream:
        """Shuffled rows of one site as a torch `IterableDataset`; for the options see `RowStream`."""
        from vllm_weir.storage.torch_dataset import RowStream

        return RowStream(self, site, **options)

    def read(self, which: np.ndarray, at: np.ndarray, space: str = "model") -> Tensor:
        """Decoded records of rows named as by `Index.expand`, in that order."""
        _check_space(space)
        if not len(which):
            return torch.zeros(0, 0)
        parts = []
        for block, (mine, records) in self.index.gather(which, at).items():
            tensor, source = torch.from_numpy(records), self.index.blocks[block]
            parts.append((mine, self.decoded(tensor, source) if space == "model" else project(tensor, source.header)))
        if len(parts) == 1:
            return parts[0][1]
        dtype = parts[0][1].dtype if len({p.dtype for _, p in parts}) == 1 else torch.float32
        if len({p.shape[1] for _, p in parts}) != 1:
            raise self.index.uneven(which, [(mine, part.shape[1]) for mine, part in parts])
        out = torch.empty(len(which), parts[0][1].shape[1], dtype=dtype)
        for mine, part in parts:
            out[torch.from_numpy(mine)] = part.to(dtype)
        return out

    @staticmethod
    def decoded(records: Tensor, block: RecordBlock) -> Tensor:
        """A block's records as rows: float32, or the stored dtype of uncompressed ones."""
        if block.header["method"] == "none":
            if not len(records):  # numpy's empty arrays have no strides to view them by
                records = records.new_zeros(records.shape)
            return records.view(PLAIN[block.header["dtype"]])
        try:
            return decode(records, block.header)
        except WeirError as e:
            raise block.store.error(block.name, f"damaged: {e.message}") from None

    def no_rows(self, runs: np.ndarray, space: str) -> Tensor:
        """What `read` gives for none of these runs' rows: as wide, and of the same dtype, as if there were some."""
        _check_space(space)
        kinds: dict[tuple, RecordBlock] = {}
        for block in (self.index.blocks[code] for code in np.unique(self.index.block[runs]).tolist()):
            kinds.setdefault(tuple(block.header[name] for name in ("method", "dtype", "d_model", "k")), block)
        none = [(torch.zeros(0, block.width, dtype=torch.uint8), block) for block in kinds.values()]
        parts = [self.decoded(*one) if space == "model" else project(one[0], one[1].header) for one in none]
        return parts[0] if len({part.dtype for part in parts}) == 1 else parts[0].float()

    def _code(self, request: object) -> int:
        if request not in self.index.code:
            raise KeyError(f"{self.url} has no request {str(request)[:80]!r}")
        return self.index.code[request]  # type: ignore[index]

    def _site(self, site: object) -> int:
        wanted = parse_site(site)
        if wanted not in self.sites:
            have = ", ".join(map(str, self.sites[:8])) or "none"
            raise KeyError(f"{self.url} has no {wanted}; it has {have}")
        return self.sites.index(wanted)

    def runs_of(self, site: object, requests: Sequence[str] | str | None) -> np.ndarray:
        """Numbers of the runs in `index` that hold rows of `site`, of all or of some requests."""
        code = self._site(site)
        if requests is None:
            return np.flatnonzero(self.index.site == code)
        wanted = {self._code(name) for name in ([requests] if isinstance(requests, str) else requests)}
        runs = np.concatenate([*map(self.index.runs_of, wanted), np.zeros(0, np.int64)])
        return np.sort(runs[self.index.site[runs] == code])

    def ordered(self, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows of runs by request and position."""
        which, at = self.index.expand(runs)
        order = np.lexsort((self.index.positions[at], self.index.request[which]))
        return which[order], at[order]

    def _select(self, which: np.ndarray, at: np.ndarray, selector: Positions) -> np.ndarray:
        if selector.kind == "all":
            return np.ones(len(at), bool)
        positions, tokens = self.index.positions[at], self.index.token_ids[at]
        if selector.needs_token_ids:
            self._check_tokens(which, tokens, selector)
            return selector.mask(positions, 0, tokens)
        if selector.kind == "list" and min(selector.numbers, default=0) >= 0:
            return selector.mask(positions, 0, tokens)
        out = np.zeros(len(at), bool)
        request = self.index.request[which]
        bounds = np.flatnonzero(np.diff(request, prepend=-1, append=-1))
        for begin, end in itertools.pairwise(bounds.tolist()):
            prompt = self._prompt_tokens(int(request[begin]), selector)
            out[begin:end] = selector.mask(positions[begin:end], prompt, tokens[begin:end])
        return out

    def _check_tokens(self, which: np.ndarray, tokens: np.ndarray, selector: Positions) -> None:
        """Raise WeirError if it is not known what a selector by token selects."""
        if selector.kind == "special":
            raise WeirError(
                "a dataset has no tokenizer to say which tokens are special; name them, "
                f"{{{'token_ids' if selector.values[0] else 'not_token_ids'!r}: tokenizer.all_special_ids}}",
                "positions.special",
            )
        if len(unknown := np.flatnonzero(tokens < 0)):
            raise WeirError(
                f"request {self.requests[self.index.request[which[unknown[0]]]][:80]!r} was stored without token ids; "
                "choose by position",
                f"positions.{selector.kind}",
            )

    def _prompt_tokens(self, request: int, selector: Positions) -> int:
        prompt = self.index.describe(request).get("prompt_tokens")
        if isinstance(prompt, int) and not isinstance(prompt, bool) and prompt >= 0:
            return prompt
        bounds = selector.values[:2] if selector.kind == "slice" else (-1,)
        if all(b is None or b >= 0 for b in bounds):
            return 0
        raise WeirError(
            f"request {self.requests[request][:80]!r} was stored without prompt_tokens, which "
            f"{selector.to_json()!r} counts from; use absolute positions",
            "positions",
        )

    def __repr__(self) -> str:
        return (
            f"ActivationDataset({self.url!r}, {self.layout}: {len(self)} requests, {len(self.sites)} sites, "
            f"{self.count()} rows)"
        )


def _check_space(space: str) -> None:
    if space not in ("model", "projected"):
        raise WeirError("space is 'model' or 'projected'", "space")


class _LazyRows(Mapping):
    """Site -> decoded rows, read at each look."""

    def __init__(
        self,
        dataset: ActivationDataset,
        runs: dict[Site, np.ndarray],
        places: dict[Site, tuple[np.ndarray, np.ndarray]],
    ) -> None:
        self._dataset, self._runs, self._places = dataset, runs, places

    def __getitem__(self, site: Site) -> Tensor:
        which, at = self._places[site]
        return self._dataset.read(which, at) if len(which) else self._dataset.no_rows(self._runs[site], "model")

    def __contains__(self, site: object) -> bool:
        return site in self._places  # without reading rows

    def __iter__(self) -> Iterator[Site]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
