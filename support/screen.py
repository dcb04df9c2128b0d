"""
What a program prints: lines that stay, and one line of a terminal that says what goes on now.

The idea. Whatever is printed is no reason to stop: where it fails (a broken pipe, a full device, a
closed stream) it is dropped. On a terminal the last line is written again and again, and only some
of the steps stay; elsewhere each step is a line. Of several ranks only rank 0 prints. Control
characters, which a file's or a model's text may hold, are escaped.
"""
import functools
import os
import sys
import unicodedata
from contextlib import contextmanager, suppress

from support import parallel
from support.jsonfile import harmless, printable


def tell(text, stream=None):
    """Print a line, which stays."""
    LAST.wipe()
    put(harmless(text) + "\n", stream or sys.stdout)


def progress(text, end, stays=True):
    """Print a step's line, columns with " | " between, and its end. On a terminal it loses the last
    columns where it is too narrow, and the next line takes its place unless it stays."""
    text, end = printable(text), printable(end)
    if not is_terminal(sys.stdout):
        tell(f"{text} | {end}")
        return
    LAST.step, LAST.end, LAST.now = text, f" | {end}", ""
    LAST.draw()
    if stays:
        LAST.leave()


def say(text):
    """What is going on now, on a terminal only; the next text takes its place, "" clears it."""
    LAST.now = printable(text)
    LAST.draw()


class LastLine:
    """The last line of a terminal, written again and again: a step, its end, and what is going on
    now. stream: where something stands there now, or None."""
    step = end = now = ""
    stream = None

    def draw(self):
        streams = [stream for stream in (sys.stdout, sys.stderr) if is_terminal(stream)]
        if not streams:
            return
        width = columns(streams[0])
        text = self.line(width)
        if text:
            put("\r" + text + " " * (width - wide(text)), streams[0])
            self.stream = streams[0]
        else:
            self.wipe()

    def line(self, width):
        """What fits: what is going on and the end first, then the step's columns from the left."""
        if not self.step:
            return cut(self.now, width)
        behind = self.end
        if self.now:
            behind += f" | {self.now}"
        first, *others = self.step.split(" | ")
        behind = cut(behind, max(0, width - wide(first)))
        text = cut(first, width)
        for column in others:
            if wide(text) + wide(f" | {column}") + wide(behind) > width:
                break
            text += f" | {column}"
        return text + behind

    def wipe(self):
        if self.stream:
            put("\r" + " " * columns(self.stream) + "\r", self.stream)
        self.stream = None

    def leave(self):
        """Let it stand and forget it: what others print begins on a line of its own."""
        if self.stream:
            put("\n", self.stream)
        self.step = self.end = self.now = ""
        self.stream = None


LAST = LastLine()


def wide(text):
    """How many columns of a terminal a text takes: letters of some scripts take two."""
    return sum(1 + (unicodedata.east_asian_width(x) in "WF") for x in text)


def cut(text, width):
    """As much of a text as fits."""
    text = text[:width]
    while wide(text) > width:
        text = text[:-1]
    return text


def is_terminal(stream):
    return bool(stream) and not stream.closed and stream.isatty()


def columns(stream):
    """How many a terminal's line has now, without the last: what fills it may scroll."""
    try:
        return (os.get_terminal_size(stream.fileno()).columns or 80) - 1
    except (OSError, ValueError):
        return 79


def put(text, stream):
    if stream is None or parallel.rank():  # it was closed before this process began
        return
    try:
        stream.write(text)
        stream.flush()
    except UnicodeEncodeError:
        put(text.encode("ascii", "backslashreplace").decode(), stream)
    except (OSError, ValueError):
        # the interpreter would try again at its end what the stream still holds, and fail
        with suppress(OSError, ValueError):
            os.dup2(nowhere(), stream.fileno())


def open_streams():
    """A file that is opened while a standard stream is closed takes its number, and what a library
    prints would end up in it: let all three lead somewhere."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one


@contextmanager
def muted():
    """Nothing is printed to stderr in here: a library in Rust prints its stack before it raises."""
    try:
        before = os.dup(2)
    except OSError:  # it is closed
        before = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


@functools.cache
def nowhere():
    return os.open(os.devnull, os.O_WRONLY)


@contextmanager
def one_line_errors(*kinds, also=None):
    """Exceptions of these kinds end the program with one line, an interrupt with 130. also(): what
    the line says behind that."""
    open_streams()
    try:
        yield
    except kinds as e:
        line = f"error: {e}"
        if len(line) > 2000:  # such as a path that is too long for the system
            line = f"{line[:1000]} ... {line[-900:]}"
        if also:
            line += also()
        sys.exit(printable(line))
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        LAST.leave()
