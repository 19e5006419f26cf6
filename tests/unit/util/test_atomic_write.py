"""Files that appear whole or not at all."""

import os
import stat

import pytest

from vllm_weir.util.atomic_write import atomic_write


def test_a_file_is_replaced_when_the_block_ends(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with atomic_write(path) as file:
        file.write(b"new")
        file.seek(0)
        assert file.read() == b"new" and path.read_bytes() == b"old"
        (temporary,) = set(tmp_path.iterdir()) - {path}
        assert temporary.name.startswith(".") and temporary.suffix == ".tmp"
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_the_older_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(error), atomic_write(path) as file:
        file.write(b"new")
        raise error
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_rename_that_fails_leaves_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError), atomic_write(tmp_path / "folder") as file:
        file.write(b"new")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_a_file_that_cannot_be_made_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "missing" / "file"):
        pass
    with pytest.raises(ValueError), atomic_write(tmp_path / "a\0b" / "file"):
        pass
    assert not list(tmp_path.iterdir())


def test_permissions(tmp_path):
    with atomic_write(tmp_path / "file", 0o600):
        pass
    assert stat.S_IMODE(os.stat(tmp_path / "file").st_mode) == 0o600
