"""`ActivationDataset`: activations by request, site and position, in any stored format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vllm_weir.codec import decode, project
from vllm_weir.errors import WeirError
from vllm_weir.results.activations import Activations
from vllm_weir.schema.compression import header_shape
from vllm_weir.schema.hooks import Site, parse_site
from vllm_weir.schema.positions import Positions
from vllm_weir.storage.batch import header_text
from vllm_weir.storage.index import UNCOMPRESSED_DTYPES, Index
from vllm_weir.storage.provenance import check_placed, selected_rows
from vllm_weir.storage.record_blocks import RecordBlock

if TYPE_CHECKING:
    from vllm_weir.storage.torch_dataset import RowStream


@dataclass(eq=False)
class DatasetRows:
    """Rows of one site, ordered by request (as in `ActivationDataset.requests`) and position.

    Attributes:
        rows: Tensor [n, d]; [n, heads, d_head] for points that have a row for each head.
        positions, token_ids: int64 [n]; token id -1 where it is unknown.
        request_index: int64 [n], index into `requests`.
        requests: The requests of the dataset.
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

    Only the index is read up front; local files are mapped into memory. Can be pickled, and used in
    DataLoader workers.
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
        """The only header; raises WeirError if there are several, see `headers`."""
        headers = self.headers
        if len(headers) != 1:
            raise WeirError(f"{self.url} has records of {len(headers)} kinds; see .headers")
        return headers[0]

    def __len__(self) -> int:
        return len(self.index.requests)

    def __iter__(self) -> Iterator[str]:
        return iter(self.index.requests)

    def __contains__(self, request: object) -> bool:
        return request in self.index.request_codes

    def __getitem__(self, request: str) -> Activations:
        """Return a request's activations; a site's rows are read when they are accessed."""
        index = self.index
        runs = index.runs_of(self._request_code(request))
        codes = np.unique(index.run_site[runs]).tolist()
        site_runs = {self.sites[code]: runs[index.run_site[runs] == code] for code in codes}
        site_rows = {site: self.ordered(some) for site, some in site_runs.items()}
        positions = {site: torch.from_numpy(index.positions[ids]) for site, (_, ids) in site_rows.items()}
        tokens = {site: torch.from_numpy(index.token_ids[ids]) for site, (_, ids) in site_rows.items()}
        return Activations(_LazyRows(self, site_runs, site_rows), positions, tokens)  # type: ignore[arg-type]

    def metadata(self, request: str) -> dict[str, Any]:
        """Return the metadata that was stored with a request."""
        return self.index.request_metadata(self._request_code(request))

    def count(self, site: object = None) -> int:
        """Return the number of rows of one site, or of all."""
        if site is None:
            return int(self.index.run_rows.sum())
        return int(self.index.run_rows[self.index.run_site == self._site_code(site)].sum())

    def rows(
        self, site: object, requests: Sequence[str] | str | None = None, positions: object = "all", *,
        space: str = "model",
    ) -> DatasetRows:  # fmt: skip
        """Read rows of one site.

        Args:
            site: ``("resid_post", 10)``, ``"resid_post.10"`` or ``"blocks.10.hook_resid_post"``.
            requests: Ids, or one id; None for all. An empty list gives [0, d], with the width and
                dtype of all rows.
            positions: A selector, as for `Capture`. Those that count from the prompt's end need
                ``prompt_tokens`` in the requests' metadata. Rows that are means or maxima over
                positions cannot be selected by position.
            space: ``"model"`` for decoded rows [n, d_model] (or of the shape that they were written
                in), float32 (uncompressed rows keep their dtype); ``"projected"`` for the
                compressed space of rp8, [n, k], in which inner products are estimates.

        Raises:
            KeyError: For a site or a request that is not there.
            WeirError: If positions cannot be selected, or the rows differ in width.
        """
        runs = self.runs_of(site, requests)
        row_runs, row_ids = self.ordered(runs)
        selector = Positions.parse(positions)
        if selector.kind != "all":
            check_placed(self.index, np.unique(self.index.run_request[row_runs]).tolist(), parse_site(site), selector)
        selected = selected_rows(self.index, row_runs, row_ids, selector)
        row_runs, row_ids = row_runs[selected], row_ids[selected]
        if not len(runs):
            runs = self.runs_of(site, None)
        return DatasetRows(
            self.read(row_runs, row_ids, space) if len(row_runs) else self.no_rows(runs, space),
            torch.from_numpy(self.index.positions[row_ids]),
            torch.from_numpy(self.index.token_ids[row_ids]),
            torch.from_numpy(self.index.run_request[row_runs]),
            self.requests,
        )

    def torch(self, site: object, **options: Any) -> RowStream:
        """Return a `RowStream` with these options: shuffled rows of one site for training."""
        from vllm_weir.storage.torch_dataset import RowStream

        return RowStream(self, site, **options)

    def read(self, row_runs: np.ndarray, row_ids: np.ndarray, space: str = "model") -> Tensor:
        """Read and decode rows, named as by `Index.expand`: tensor [n, *shape], in that order."""
        _check_space(space)
        if not len(row_runs):
            return torch.zeros(0, 0)
        parts = []
        for code, (chosen, records) in self.index.gather(row_runs, row_ids).items():
            tensor, block = torch.from_numpy(records), self.index.blocks[code]
            parts.append((chosen, self.decoded(tensor, block) if space == "model" else project(tensor, block.header)))
        if len(parts) == 1:
            return parts[0][1]
        dtype = parts[0][1].dtype if len({part.dtype for _, part in parts}) == 1 else torch.float32
        if len({part.shape[1:] for _, part in parts}) != 1:
            raise self.index.width_error(row_runs, [(chosen, tuple(part.shape[1:])) for chosen, part in parts])
        rows = torch.empty(len(row_runs), *parts[0][1].shape[1:], dtype=dtype)
        for chosen, part in parts:
            rows[torch.from_numpy(chosen)] = part.to(dtype)
        return rows

    @staticmethod
    def decoded(records: Tensor, block: RecordBlock) -> Tensor:
        """Decode records of a block to rows [n, *shape].

        They are float32, or of the stored dtype if they are uncompressed.
        """
        if block.header["method"] == "none":
            if not len(records):  # numpy's empty arrays have no strides to view them by
                records = records.new_zeros(records.shape)
            rows = records.view(UNCOMPRESSED_DTYPES[block.header["dtype"]])
            return rows.view(len(rows), *header_shape(block.header))
        try:
            return decode(records, block.header)
        except WeirError as e:
            raise block.store.error(block.name, f"damaged: {e.message}") from None

    def no_rows(self, runs: np.ndarray, space: str) -> Tensor:
        """Return an empty tensor [0, *shape] with the shape and dtype of the rows of some runs."""
        _check_space(space)
        blocks: dict[tuple, RecordBlock] = {}
        for block in (self.index.blocks[code] for code in np.unique(self.index.run_block[runs]).tolist()):
            kind = tuple(block.header[name] for name in ("method", "dtype", "k"))
            blocks.setdefault((*kind, header_shape(block.header)), block)
        none = [(torch.zeros(0, block.width, dtype=torch.uint8), block) for block in blocks.values()]
        parts = [self.decoded(*one) if space == "model" else project(one[0], one[1].header) for one in none]
        return parts[0] if len({part.dtype for part in parts}) == 1 else parts[0].float()

    def _request_code(self, request: object) -> int:
        if request not in self.index.request_codes:
            raise KeyError(f"{self.url} has no request {str(request)[:80]!r}")
        return self.index.request_codes[request]  # type: ignore[index]

    def _site_code(self, site: object) -> int:
        wanted = parse_site(site)
        if wanted not in self.sites:
            have = ", ".join(map(str, self.sites[:8])) or "none"
            raise KeyError(f"{self.url} has no {wanted}; it has {have}")
        return self.sites.index(wanted)

    def runs_of(self, site: object, requests: Sequence[str] | str | None) -> np.ndarray:
        """Return the runs of a site, of all or some requests: int64 [runs], ascending."""
        code = self._site_code(site)
        if requests is None:
            return np.flatnonzero(self.index.run_site == code)
        wanted = {self._request_code(name) for name in ([requests] if isinstance(requests, str) else requests)}
        runs = np.concatenate([*map(self.index.runs_of, wanted), np.zeros(0, np.int64)])
        return np.sort(runs[self.index.run_site[runs] == code])

    def ordered(self, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of some runs, as `Index.expand` does, ordered by request and position."""
        row_runs, row_ids = self.index.expand(runs)
        order = np.lexsort((self.index.positions[row_ids], self.index.run_request[row_runs]))
        return row_runs[order], row_ids[order]

    def __repr__(self) -> str:
        return (
            f"ActivationDataset({self.url!r}, {self.layout}: {len(self)} requests, {len(self.sites)} sites, "
            f"{self.count()} rows)"
        )


def _check_space(space: str) -> None:
    if space not in ("model", "projected"):
        raise WeirError("space is 'model' or 'projected'", "space")


class _LazyRows(Mapping):
    """Site -> decoded rows, which are read at every access."""

    def __init__(
        self,
        dataset: ActivationDataset,
        site_runs: dict[Site, np.ndarray],
        site_rows: dict[Site, tuple[np.ndarray, np.ndarray]],
    ) -> None:
        self._dataset, self._site_runs, self._site_rows = dataset, site_runs, site_rows

    def __getitem__(self, site: Site) -> Tensor:
        row_runs, row_ids = self._site_rows[site]
        if len(row_runs):
            return self._dataset.read(row_runs, row_ids)
        return self._dataset.no_rows(self._site_runs[site], "model")

    def __contains__(self, site: object) -> bool:
        return site in self._site_rows  # Mapping's own would read rows

    def __iter__(self) -> Iterator[Site]:
        return iter(self._site_rows)

    def __len__(self) -> int:
        return len(self._site_rows)
