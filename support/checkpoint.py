"""
Files that appear whole or not at all, in the folder where they are meant to be, and checkpoints
that say when they are damaged.

The idea. Bytes go to a new file under a temporary name, to the disk (fsync), then over the old
file, and the folder goes to the disk too: a crash, a kill or a power cut leaves the old file or the
new one. Whoever may write to a folder can plant a link there, so below a folder that is held
(run.py) each step goes from descriptor to descriptor and through no link. A checkpoint is what
torch.save writes, behind it a line with the CRC-32 of all that: torch.load reads it as ever, here a
single flipped bit is found. (The checksums inside the container are not enough: flips in its
directory can pass them and load as other weights.)

Left out on purpose: anything that knows what a run is (run.py); links where there is no dir_fd
(Windows).
"""
import errno
import hashlib
import json
import os
import shutil
import stat
import zlib
from contextlib import contextmanager, suppress

import torch

# where

HELD = {}  # folder that a run holds -> its descriptor, open until this process ends
UNFINISHED = ".smd-tmp"  # ends the name of what is being written, and no other's
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
# nor is a FIFO waited for, nor a line break changed
WRITE = NO_LINK | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
A_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)


@contextmanager
def folder_of(path):
    """-> descriptor of the folder that path is in (for dir_fd=), name there. Raises OSError, which
    names it, for a link below a folder of HELD: nothing is written through one."""
    if os.open not in os.supports_dir_fd:  # Windows
        yield None, path
        return
    folder, name = os.path.split(path)
    at, below = held_above(os.path.abspath(folder))
    fd = os.open(folder or ".", A_FOLDER) if at is None else os.dup(at)
    try:
        for part in below:
            with naming_links(folder):
                inner = os.open(part, A_FOLDER | NO_LINK, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd, name
    finally:
        os.close(fd)


def held_above(folder):
    """The descriptor of the first of a path's folders that is held, the names below it; None and
    nothing if none is."""
    names, there = folder.split(os.sep), os.sep
    for i, name in enumerate(names):
        there = os.path.join(there, name)
        for fd in HELD.values():
            with suppress(OSError):
                if os.path.samestat(os.stat(there), os.fstat(fd)):
                    return fd, names[i + 1:]
    return None, []


@contextmanager
def naming_links(path):
    """What the system says of a link that it was not to follow becomes OSError, which names it."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        text = f"{path} is a link, or leads through one, and nothing is written there"
        raise OSError(text) from None


def open_to_append(path):
    """A file that grows, in binary, which may also be read and cut; it is made if it is not there.
    Raises OSError, which names it, for a link, a pipe and a file that has another name too, of
    which whoever gave it that one may know."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | WRITE
    with folder_of(path) as (at, name), naming_links(path):
        fd = os.open(name, flags, 0o666, dir_fd=at)
    about, wrong = os.fstat(fd), None
    if not stat.S_ISREG(about.st_mode):
        wrong = "is not a regular file"
    elif about.st_nlink > 1:
        wrong = "has another hard link"
    if wrong:
        os.close(fd)
        raise OSError(f"{path} {wrong}, and is not written to")
    return open(fd, "a+b")


def remove(path):
    with suppress(FileNotFoundError), folder_of(path) as (at, name):
        os.unlink(name, dir_fd=at)


# writing

def sync(path):
    """Make a file outlive a power cut."""
    if os.name == "nt":  # where only what is open to be written can be told to
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def new_file(name, at):
    """A file that was not there, to be written. at: descriptor of its folder, or None."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | WRITE
    return open(os.open(name, flags, 0o666, dir_fd=at), "wb")


def write_whole(path, write, previous=None):
    """write(file), then rename: a crash, a kill or a full disk in the middle leaves what was there
    before. previous: a name in the same folder, under which that stays."""
    tmp = path + UNFINISHED
    try:
        remove(tmp)  # of a kill
        with folder_of(path) as (at, name):
            with new_file(name + UNFINISHED, at) as f:
                write(f)
                f.flush()
                os.fsync(f.fileno())
            if previous and os.path.exists(path):
                keep_as(path, previous)
            os.replace(name + UNFINISHED, name, src_dir_fd=at, dst_dir_fd=at)
            if at is not None:
                os.fsync(at)
    except (OSError, RuntimeError) as e:
        if isinstance(e, RuntimeError) and isinstance(e.__context__, OSError):
            e = e.__context__  # torch hides a full disk behind an error of its own
        with suppress(OSError):
            remove(tmp)
        reason = " ".join((getattr(e, "strerror", None) or str(e)).split())
        text = f"could not write {path}: {reason}; what was there is untouched"
        raise OSError(text) from None


def keep_as(path, previous):
    """Let `previous` be what path is now; path is there all the time."""
    tmp = previous + UNFINISHED
    remove(tmp)
    with folder_of(path) as (at, name), folder_of(previous) as (other, kept):
        where = {}
        if at is not None:
            where = dict(src_dir_fd=at, dst_dir_fd=other, follow_symlinks=False)
        try:
            os.link(name, kept + UNFINISHED, **where)
        except OSError:  # a file system without hard links
            source = os.open(name, os.O_RDONLY | WRITE, dir_fd=at)
            with open(source, "rb") as old, new_file(kept + UNFINISHED, other) as new:
                shutil.copyfileobj(old, new, 2**24)
        os.replace(kept + UNFINISHED, kept, src_dir_fd=other, dst_dir_fd=other)
    remove(tmp)  # replacing a file by itself leaves both names


def write_bytes(path, data):
    write_whole(path, lambda f: f.write(data))


def write_text(path, text):
    write_bytes(path, text.encode())


KINDS = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16",
         torch.float16: "F16"}


def write_tensors(path, tensors):
    """{name: tensor of KINDS} as a safetensors file, as that library writes it; here, because it
    takes a path, where only a file is known to be the one that was made. Raises OSError."""
    kinds = [*KINDS]
    names = sorted(tensors, key=lambda name: (kinds.index(tensors[name].dtype), name))
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name in names:
        x = tensors[name]
        header[name] = dict(dtype=KINDS[x.dtype], shape=[*x.shape],
                            data_offsets=[end, end + x.nbytes])
        end += x.nbytes
    head = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    head += b" " * (-len(head) % 8)

    def write(f):
        f.write(len(head).to_bytes(8, "little") + head)
        for name in names:
            f.write(tensors[name].detach().cpu().reshape(-1).view(torch.uint8).numpy())

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
    def write(f):
        summed = Summed(f)
        torch.save(state, summed)
        f.write(TRAILER % summed.crc)
    write_whole(path, write, previous)


def check_whole(path):
    """Raises FileNotFoundError or, for a checkpoint that is not as it was written, ValueError,
    which name it."""
    if not os.path.isfile(path):  # a FIFO would be waited for
        raise FileNotFoundError(f"{path} does not exist, or is not a regular file")
    crc, size = 0, os.path.getsize(path) - LENGTH
    with open(path, "rb") as f:
        for start in range(0, size, 2**24):
            crc = zlib.crc32(f.read(min(2**24, size - start)), crc)
        if f.read() != TRAILER % crc:
            text = "its checksum is not that of its bytes"
            raise ValueError(f"{path} is damaged: {text}")


def read_checkpoint(path):
    """-> state, on the CPU. Raises as check_whole does."""
    check_whole(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whole, but not written here
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(f"{path} is damaged: {reason}") from None


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
