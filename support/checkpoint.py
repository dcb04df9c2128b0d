"""
Files that appear whole or not at all, and checkpoints that say when they are damaged.

The idea. Bytes go to a temporary name, to the disk (fsync), then over the old file, and the folder
goes to the disk too: a crash, a kill or a power cut leaves the old file or the new one. A
checkpoint is what torch.save writes, behind it a line with the CRC-32 of all that: torch.load reads
it as ever, here a single flipped bit is found. (The checksums inside the container are not enough:
flips in its directory can pass them and load as other weights.)

Left out on purpose: anything that knows what a run is (run.py).
"""
import hashlib
import os
import shutil
import zlib
from contextlib import suppress

import torch

# writing

UNFINISHED = ".smd-tmp"  # behind the name of what is being written; nobody's own file ends so

def sync(path):
    """Make a file or a folder outlive a power cut."""
    if os.name == "nt":  # Windows opens no folders
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(path, write, previous=None):
    """write(temporary path), then rename: a crash, a kill or a full disk in the middle leaves what
    was there before. previous: a name under which that stays."""
    tmp = path + UNFINISHED
    try:
        write(tmp)
        sync(tmp)
        if previous and os.path.exists(path):
            keep_as(path, previous)
        os.replace(tmp, path)
        sync(os.path.dirname(path) or ".")
    except (OSError, RuntimeError) as e:  # torch reports a full disk as RuntimeError
        if os.path.isfile(tmp):
            os.remove(tmp)
        reason = " ".join(str(e).split())
        raise OSError(f"could not write {path}: {reason}; what was there is untouched") from None


def keep_as(path, name):
    """Let `name` be what `path` is now; path is there all the time."""
    tmp = name + UNFINISHED
    remove(tmp)
    try:
        os.link(path, tmp)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, tmp)
    os.replace(tmp, name)
    remove(tmp)  # replacing a file by itself leaves both names


def remove(path):
    with suppress(FileNotFoundError):
        os.remove(path)


def write_bytes(path, data):
    def write(tmp):
        with open(tmp, "wb") as f:
            f.write(data)
    write_whole(path, write)


def write_text(path, text):
    write_bytes(path, text.encode())


def write_tensors(path, tensors):
    """{name: tensor} as a safetensors file. Raises OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    copies = {name: t.to("cpu", copy=True) for name, t in tensors.items()}  # none shares storage

    def write(tmp):
        inside = tmp + ".d"  # save_file leaves a file of another name where it is killed
        shutil.rmtree(inside, ignore_errors=True)
        os.mkdir(inside)
        try:
            save_file(copies, os.path.join(inside, "tensors"), metadata={"format": "pt"})
            os.replace(os.path.join(inside, "tensors"), tmp)
        except SafetensorError as e:
            raise OSError(e) from None
        finally:
            shutil.rmtree(inside, ignore_errors=True)
        umask = os.umask(0)  # save_file's files are for their owner alone
        os.umask(umask)
        os.chmod(tmp, 0o666 & ~umask)

    write_whole(path, write)


# checkpoints

TRAILER = b"crc32 %08x\n"
LENGTH = len(TRAILER % 0)


class Summed:
    """A file that is written, with the CRC-32 of what it was given."""

    def __init__(self, file):
        self.file, self.crc = file, 0

    def write(self, data):
        self.crc = zlib.crc32(data, self.crc)
        return self.file.write(data)

    def flush(self):
        self.file.flush()


def write_checkpoint(path, state, previous=None):
    """state: dict of tensors, numbers, text, lists and dicts."""
    def write(tmp):
        with open(tmp, "wb") as f:
            summed = Summed(f)
            torch.save(state, summed)
            f.write(TRAILER % summed.crc)
    write_whole(path, write, previous)


def read_checkpoint(path):
    """-> state, on the CPU. Raises FileNotFoundError or, for a file that is not as it was written,
    ValueError, which name it."""
    if not os.path.isfile(path):  # a FIFO would be waited for
        raise FileNotFoundError(f"{path} does not exist, or is no regular file")
    crc, size = 0, os.path.getsize(path) - LENGTH
    with open(path, "rb") as f:
        for start in range(0, size, 2**24):
            crc = zlib.crc32(f.read(min(2**24, size - start)), crc)
        if f.read() != TRAILER % crc:
            raise ValueError(f"{path} is damaged: its checksum is not that of its bytes")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # whole, but not written here: whatever its first wrong byte leads to
        reason = " ".join(str(e).split())[:200]
        raise ValueError(f"{path} is damaged: {type(e).__name__}: {reason}") from None


def fingerprint(*paths):
    """SHA-256 of the contents of those files that exist and, of several, their names."""
    total = hashlib.sha256()
    for path in paths:
        if os.path.isfile(path):
            if len(paths) > 1:  # which of them it is
                total.update(os.fsencode(os.path.basename(path)))
            total.update(b" %d " % os.path.getsize(path))
            with open(path, "rb") as f:
                while block := f.read(2**24):
                    total.update(block)
    return total.hexdigest()
