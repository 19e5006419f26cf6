"""Lines of the text files that users write: UTF-8 with or without a byte-order mark, LF or CRLF, blank lines."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from os import PathLike
from typing import Any

from vllm_weir.errors import StoreError, WeirError


def text_lines(stream: Iterable[bytes], number: int = 1) -> Iterator[tuple[int, bytes]]:
    """Yield the number and content of each line, ended by a newline alone, that is not blank, without its end.

    `number` is of the first line; line 1 may begin with a byte-order mark.
    """
    for i, line in enumerate(stream, number):
        if i == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.isspace() and line:
            yield i, line.removesuffix(b"\n").removesuffix(b"\r")


def read_lines(path: str | PathLike, field: str) -> Iterator[tuple[str, str]]:
    """Yield where each line of a file that is not blank is, for errors, and its text.

    Raises:
        WeirError: naming `field`, for a line that is not UTF-8.
        StoreError: likewise, if the file cannot be read.
    """
    where = str(path)
    try:
        with open(path, "rb") as file:
            for number, line in text_lines(file):
                where = f"{path}, line {number}"
                if (text := line.decode()).strip():
                    yield where, text
    except OSError as e:
        raise StoreError(f"cannot read {path}: {e.strerror or e}", field) from None
    except UnicodeDecodeError as e:
        raise WeirError(f"{where} is not UTF-8: {e.reason} at its byte {e.start}", field) from None


def read_json_lines(path: str | PathLike, field: str) -> Iterator[tuple[str, Any]]:
    """Yield where each line of a file that is not blank is, for errors, and its value, which is JSON.

    Raise WeirError naming `field`, as `read_lines` does, and for a line that is no JSON.
    """
    for where, line in read_lines(path, field):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise WeirError(f"{where} is not JSON: {e}", field) from None
        yield where, value
