"""Size and digest of a file or a folder, by which what a stage made is known again."""

import hashlib
from pathlib import Path


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    return sum(file.stat().st_size for file in _files(path))


def digest_of_path(path: Path) -> str:
    """Digest of a file's bytes; of a folder, that of its files' relative names and bytes."""
    total = hashlib.sha256()
    for file in _files(path):
        with open(file, "rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        if file == path:
            return content[:16]
        total.update(f"{file.relative_to(path).as_posix()}\0{content}\n".encode())
    return total.hexdigest()[:16]


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
