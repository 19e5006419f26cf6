"""Files that others wrote: bounds before they are unpacked, and one list of what damage looks like."""

from __future__ import annotations

import math
import os
import pickle
import re
import stat
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError

from vllm_weir.errors import MissingFile, StoreError, WeirError, brief

try:
    from lzma import LZMAError
except ImportError:  # a Python that was built without it

    class LZMAError(Exception):  # type: ignore[no-redef]
        """A stand-in that is never raised."""


DAMAGE = (
    zipfile.BadZipFile, zlib.error, LZMAError, struct.error, tokenize.TokenError, SafetensorError,
    pickle.UnpicklingError, OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, EOFError,
    SyntaxError, AssertionError, RuntimeError, MemoryError,
)  # fmt: skip
"""What zipfile, numpy, torch and safetensors raise for damaged files; NotImplementedError and RecursionError are
RuntimeErrors, and UnicodeError a ValueError."""
MAX_NAMES = 4096
"""Most tensors or arrays in a file."""
_MAX_LIST = 1 << 20
"""Most bytes of the list of names in an archive, which zipfile reads whole."""
MOST_UNPACKED, MOST_RATIO = 64 << 20, 16
"""A file may unpack to so many bytes, or to so many times its own: weights hardly compress."""
Shapes = dict[str, tuple[tuple[int, ...], np.dtype]]
_STAND_INS = (
    (rb"\s*\Z", "it is empty"),
    (rb"version https://git-lfs", "it is a pointer of Git LFS; fetch the file itself with `git lfs pull`"),
    (rb"\s*(?i:<!doctype|<html|<\?xml)", "it is a web page, as refused downloads leave one; download the file itself"),
)


@contextmanager
def damage_refused(says: str, field: str, head: bytes | None = None) -> Iterator[None]:
    """Raise what damage looks like as a WeirError at `field` that `says` what is wrong then.

    `head` are the file's first bytes, which may tell more; None if they are not at hand.
    """
    try:
        yield
    except WeirError:
        raise
    except DAMAGE as e:
        reason = "" if head is None else stand_in(head)
        reason = reason or (str(e).splitlines() or [type(e).__name__])[0][:120]
        raise WeirError(f"{says} ({reason})", field) from None


def stand_in(head: bytes) -> str:
    """Return what the first bytes of a file say it is, if no program wrote tensors there, else an empty string."""
    head = head.removeprefix(b"\xef\xbb\xbf")
    for pattern, text in _STAND_INS:
        if re.match(pattern, head):
            return text
    text = head[:1024].decode(errors="replace")
    if len(text) < 16 or "\ufffd" in text[:-3] or not all(c.isprintable() or c.isspace() for c in text):
        return ""
    return f"it is text that begins with {text.splitlines()[0][:40]!r}"


def open_regular(path: str | os.PathLike, field: str = "path") -> BinaryIO:
    """Open a regular file to read it: a pipe would hold the thread until somebody writes, and a device has no end.

    Raises MissingFile if there is none; StoreError if it cannot be read, or is no regular file.
    """
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    except FileNotFoundError:
        raise MissingFile(f"cannot read {brief(path, 200)}: there is no such file", field) from None
    except (OSError, ValueError) as e:
        raise StoreError(f"cannot read {brief(path, 200)}: {str(e)[:80]}", field) from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise StoreError(f"cannot read {brief(path, 200)}: it is a pipe or a device; name a regular file", field)
    return file


def read_regular(path: str | os.PathLike, field: str = "path") -> bytes:
    with open_regular(path, field) as file:
        try:
            return file.read()
        except OSError as e:
            raise StoreError(f"cannot read {brief(path, 200)}: {str(e)[:80]}", field) from None


class _Listed:
    """A file that refuses to be read at once by more than a list of names may have."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.listed = file, False

    def read(self, size: int = -1) -> bytes:
        if not self.listed and size > _MAX_LIST:
            raise ValueError(f"its list of names has {size} bytes, more than the limit of {_MAX_LIST}")
        return self._file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def open_archive(file: BinaryIO, bounded: bool = True) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive, before anything in it is unpacked.

    `bounded`: whether it may unpack to `MOST_UNPACKED` bytes only, or `MOST_RATIO` times its own. Raises ValueError if
    it has more names, or would unpack to more; and others of `DAMAGE`.
    """
    listed = _Listed(file)
    with zipfile.ZipFile(listed) as archive:  # type: ignore[arg-type]
        listed.listed = True
        entries = archive.infolist()
        if len(entries) > MAX_NAMES:
            raise ValueError(f"{len(entries)} names, more than the limit of {MAX_NAMES}")
        size, most = (
            sum(entry.file_size for entry in entries),
            max(MOST_UNPACKED, MOST_RATIO * file.seek(0, os.SEEK_END)),
        )
        if bounded and size > most:
            raise ValueError(f"it unpacks to {size} bytes, more than the limit of {most}")
        yield archive


def npz_arrays(
    file: BinaryIO, wanted: Collection[str] | None = None, bounded: bool = True
) -> tuple[dict[str, np.ndarray], Shapes]:
    """Read an npz file.

    Args:
        wanted: names of the arrays to read; None for all.
        bounded: as for `open_archive`.

    Returns:
        Arrays by name, and the (shape, dtype) of all.

    Raises:
        Exception: one of `DAMAGE`.
    """
    arrays, shapes = {}, {}
    with open_archive(file, bounded) as archive:
        for entry in archive.infolist():
            name = entry.filename.removesuffix(".npy")
            if name == entry.filename:
                continue
            with archive.open(entry) as member:
                shapes[name] = _npy_header(member, entry.file_size)
            if wanted is None or name in wanted:
                with archive.open(entry) as member:
                    arrays[name] = np.lib.format.read_array(member, allow_pickle=False)
    return arrays, shapes


def npy_array(file: BinaryIO) -> np.ndarray:
    """Read an npy file; raise one of `DAMAGE` for anything else."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    _npy_header(file, size)
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)


def _npy_header(file: Any, size: int) -> tuple[tuple[int, ...], np.dtype]:
    """Return shape and dtype of an array, whose file has `size` bytes: numpy makes it before it reads the numbers."""
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"npy version {version}")
    shape, _, dtype = readers[version](file)
    if dtype.hasobject:
        raise ValueError("it holds objects, which would have to run code")
    if (says := math.prod(shape) * dtype.itemsize) != (has := size - file.tell()):
        raise ValueError(f"an array of {says} bytes in {has}")
    return shape, dtype


def load_torch(path: str | os.PathLike, field: str, classes: Mapping[str, type] | None = None) -> Any:
    """Return the content of a file of ``torch.save``, whose tensors are mapped from it; no code of it runs.

    `field`: named by errors; `classes`: further classes by the names that the file has for them, whose fields are read.
    Raises WeirError for a file that is damaged, or holds anything but tensors, arrays, plain values and `classes`.
    """
    import torch

    allowed = [*_NUMPY, *((one, name) for name, one in (classes or {}).items())]
    says = "damaged, or to be read by running code of it only; save it in its own library with torch.save, as tensors"
    with damage_refused(says, field), open_regular(path) as file:
        with open_archive(file) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("it is compressed, which torch.save does not do")
            pickled = next((name for name in archive.namelist() if name.endswith("/data.pkl")), "data.pkl")
            _check_names(archive.read(pickled), {name for _, name in allowed})
        # Mapped, a tensor that claims more than its record has is within the file all the same, or refused.
        # By number: torch reads a file whose name ends in .safetensors as one, whatever is in it.
        with torch.serialization.safe_globals([*allowed, *_NUMBER_TYPES]):
            return torch.load(f"/dev/fd/{file.fileno()}", map_location="cpu", weights_only=True, mmap=True)


def _check_names(pickled: bytes, known: Collection[str]) -> None:
    """Raise UnpicklingError for a pickle that calls what makes objects of any size, as torch lets it."""
    import pickletools

    for code, argument, _ in pickletools.genops(pickled):
        name = str(argument).replace(" ", ".", 1)
        if code.name in ("GLOBAL", "INST", "STACK_GLOBAL") and name not in known and not _TENSORS.fullmatch(name):
            raise pickle.UnpicklingError(f"it calls {brief(name, 80)}")


_TENSORS = re.compile(
    r"collections\.OrderedDict|_codecs\.encode|torch\.(?:Size|device|[A-Z]\w+Storage|b?float\d*|double|half|int\d*)"
    r"|torch\._utils\._rebuild_(?:tensor_v2|parameter)",
    re.ASCII,
)
"""What tensors, and dictionaries of them, are made of in a pickle."""


class _Array(np.ndarray):
    """An array of a pickle: empty until its numbers come, whatever shape the file asks for."""

    def __new__(cls, *_: Any) -> _Array:
        return super().__new__(cls, (0,))


def _new_array(*_: Any) -> _Array:
    return _Array()


def _number_type(name: Any, *_: Any) -> np.dtype:
    if not re.fullmatch(r"[<>=|]?[fiu][1248]", str(name)):
        raise ValueError(f"an array of {brief(name)!r}")
    return np.dtype(name)


_NUMPY: tuple[tuple[Any, str], ...] = (
    (_new_array, "numpy._core.multiarray._reconstruct"),
    (_new_array, "numpy.core.multiarray._reconstruct"),
    (_Array, "numpy.ndarray"),
    (_number_type, "numpy.dtype"),
)
_NUMBER_TYPES = tuple(
    type(np.dtype(name)) for name in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
)
"""Of dtypes, whose byte order a pickle sets."""
