"""What requests hold so that their rows leave the device as products, compressed, or as what was read off them."""

from __future__ import annotations

from vllm_weir.schema.request import Postprocess
from vllm_weir.worker.planning.capture_planner import ReadOutCodec
from vllm_weir.worker.transfer.codecs import Codecs
from vllm_weir.worker.transfer.directions import Directions
from vllm_weir.worker.transfer.read_outs import ReadOuts


class RequestCodecs:
    """Holds the codec of each request's rows until the request is released."""

    def __init__(self, directions: Directions, compressions: Codecs, read_outs: ReadOuts) -> None:
        self._directions, self._compressions, self._read_outs = directions, compressions, read_outs

    def absent_vectors(self, postprocess: Postprocess | None) -> tuple[str, ...]:
        """Return the digests of vectors that would have to be fetched for a request's codec."""
        if postprocess is None or not postprocess.directions:
            return ()
        return self._directions.absent(postprocess.directions)

    def hold(self, request_id: str, postprocess: Postprocess | None, endpoint: str) -> tuple[int, ReadOutCodec | None]:
        """Return `codec` and `read_out_codec` of `Planner.add_capture` for a request of the reader at `endpoint`.

        Raises ValueError if a direction cannot be fetched; WeirError if the device cannot compute it, or something
        cannot be read.
        """
        if postprocess is None:
            return -1, None
        if postprocess.directions:
            return self._directions.hold(request_id, postprocess.directions, endpoint), None
        if postprocess.compression is not None:
            return self._compressions.hold(request_id, postprocess.compression), None
        if postprocess.read_outs:
            return -1, self._read_outs.hold(request_id, postprocess.read_outs, postprocess.with_rows)
        return -1, None

    def release(self, request_id: str) -> None:
        self._directions.release(request_id)
        self._compressions.release(request_id)
        self._read_outs.release(request_id)
