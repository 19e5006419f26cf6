"""Features and lenses on the device: ids and values are read off a step's rows, and only those leave it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_weir.sae.autoencoder import SAE
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.read_outs import FEATURES, ReadOut, RecordLayout
from vllm_weir.schema.rows import RowShape, row_width
from vllm_weir.schema.taps import column_of
from vllm_weir.util.top import as_records
from vllm_weir.worker.lenses import Lenses
from vllm_weir.worker.transfer.codecs import Codecs


class Reader(Protocol):
    """Reads ids and values off the rows of one site."""

    @property
    def width(self) -> int:
        """Values of a row, of those that its rows of the ring hold."""

    @property
    def group(self) -> object:
        """Equal for readers that can read rows of different sites together."""

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the records, int32 [n, values], of rows [n, width]."""


@dataclass(frozen=True, eq=False)
class FeatureReader:
    """Reads features of an autoencoder."""

    sae: SAE  # on the device
    read_out: ReadOut  # what to read
    width: int  # of a row of its site
    ids: torch.Tensor | None  # the chosen features on the device; None for the most active ones

    @property
    def group(self) -> object:
        """Its site's rows are read alone."""
        return self

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the records of rows."""
        if rows.is_cuda:
            # The request may leave, and the weights be freed, before the device has used them.
            for tensor in self.sae.tensors.values():
                tensor.record_stream(torch.cuda.current_stream())
        if self.sae.head is not None:
            rows = rows.unflatten(1, (-1, self.sae.d_in))
        if self.ids is not None:
            return self.sae.chosen(rows, self.ids).view(torch.int32)
        return as_records(*self.sae.top(rows, self.read_out.top_k))


@dataclass(frozen=True)
class Place:
    """Where a reader finds its rows, and puts its records, among the columns of a token.

    Attributes:
        reader: the reader.
        first, count: its columns.
        offset: of its record, in int32.
    """

    reader: Reader
    first: int
    count: int
    offset: int


class ReadOutCodec:
    """The codec whose records are what was read off rows; it is for tokens with given columns.

    Args:
        places: of the readers.
        columns: rows of the ring that a token has.
        record_bytes: of the record of each of these rows; the records of a site's readers are in
            that of the first row of the ring of its row.
        with_rows: whether each record begins with the row of the ring itself.
    """

    quick, by_column = False, True

    def __init__(self, places: Sequence[Place], columns: int, record_bytes: int, with_rows: bool = False) -> None:
        self._places, self._columns, self.record_bytes, self._with_rows = places, columns, record_bytes, with_rows

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the records of tokens' rows [n, d_model], those of a token side by side: uint8 [n, record_bytes]."""
        records = self.encode_columns(rows.unflatten(0, (-1, self._columns)), 0)
        return records.view(-1, self.record_bytes)

    @torch.inference_mode()
    def encode_columns(self, rows: torch.Tensor, place: int) -> torch.Tensor:
        """Return the records of rows [tokens, columns, d_model], the first at `place` among a token's columns.

        They are uint8 [tokens, columns, record_bytes].
        """
        tokens, columns, _ = rows.shape
        out = torch.zeros(tokens, columns, self.record_bytes // 4, dtype=torch.int32, device=rows.device)
        groups: dict[object, list[Place]] = {}
        for one in self._places:
            if place <= one.first < place + columns:
                groups.setdefault(one.reader.group, []).append(one)
        for group in groups.values():
            found = group[0].reader.read(torch.cat([_rows_of(one, rows, place) for one in group]))
            for one, records in zip(group, found.split(tokens), strict=True):
                out[:, one.first - place, one.offset : one.offset + records.shape[1]] = records
        records = out.view(torch.uint8)
        if self._with_rows:
            records[:, :, : rows.shape[2] * rows.itemsize] = rows.contiguous().view(torch.uint8)
        return records


def _rows_of(one: Place, rows: torch.Tensor, place: int) -> torch.Tensor:
    first = one.first - place
    return rows[:, first : first + one.count].flatten(1)[:, : one.reader.width]


class ReadOuts:
    """The codecs of read-outs in use; requests that read the same share one.

    Args:
        hold_sae: (request, key) -> the autoencoder, which stays until the request is released, or
            raises WeirError.
        shapes: site -> shape of a row, where that is not (d_model,).
        d_model: values of a row of the ring.
        itemsize: bytes of one.
    """

    def __init__(
        self,
        codecs: Codecs,
        hold_sae: Callable[[str, str], SAE],
        shapes: Mapping[Site, RowShape],
        d_model: int,
        device: torch.device,
        lenses: Lenses,
        itemsize: int,
    ) -> None:
        self._lenses, self._itemsize = lenses, itemsize
        self._codecs, self._hold_sae, self._shapes, self._d_model = codecs, hold_sae, shapes, d_model
        self._device = device
        self._numbers: dict[tuple, int] = {}
        self._users: dict[tuple, set[str]] = {}
        self._held: dict[str, set[tuple]] = {}

    def hold(
        self, request_id: str, read_outs: tuple[ReadOut, ...], with_rows: bool
    ) -> Callable[[tuple[int, ...]], int]:
        """Return what gives the number of the codec for rows with these columns, until `release`.

        `with_rows`: whether the rows are sent, too. Raises WeirError if something cannot be read.
        """
        readers = {read_out: self._reader(request_id, read_out) for read_out in read_outs}
        layout = RecordLayout.of(read_outs, self._d_model * self._itemsize if with_rows else 0)

        def number_for(columns: tuple[int, ...]) -> int:
            key = (columns, read_outs, with_rows)
            if key not in self._numbers:
                self._numbers[key] = self._codecs.add(_codec(readers, layout, columns, with_rows))
            self._users.setdefault(key, set()).add(request_id)
            self._held.setdefault(request_id, set()).add(key)
            return self._numbers[key]

        return number_for

    def release(self, request_id: str) -> None:
        """Release the codecs of a request that has left, if it has any."""
        for key in self._held.pop(request_id, ()):
            self._users[key].discard(request_id)
            if not self._users[key]:
                del self._users[key]
                self._codecs.remove(self._numbers.pop(key))

    def _reader(self, request_id: str, read_out: ReadOut) -> Reader:
        if read_out.kind == FEATURES:
            sae = self._hold_sae(request_id, read_out.key)
            width = row_width(self._shapes.get(read_out.site, (self._d_model,)))
            ids = torch.tensor(read_out.ids, device=self._device) if read_out.ids else None
            return FeatureReader(sae, read_out, width, ids)
        return self._lenses.reader(read_out)


def _codec(
    readers: Mapping[ReadOut, Reader], layout: RecordLayout, columns: tuple[int, ...], with_rows: bool
) -> ReadOutCodec:
    places = []
    for read_out, reader in readers.items():
        column = column_of(read_out.site, False)
        if count := columns.count(column):
            places.append(Place(reader, columns.index(column), count, layout.offsets[read_out] // 4))
    return ReadOutCodec(places, len(columns), layout.record_bytes, with_rows)
