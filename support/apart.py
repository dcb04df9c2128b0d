"""
A program from outside, such as a chat template, in a process of its own: how long it computes and
what memory it takes is limited by the system, where the program cannot reach.

The idea. A child is forked, makes an object there and answers what it is asked, until this process
ends. The kernel counts its computing time for each question (so a busy machine is no reason) and
refuses it more memory than it began with and so much beside. Text alone comes back.

Left out on purpose: limits where there is no fork (Windows), of memory where there is no /proc;
there the object is asked in this process. What the program may do is not limited here.
"""
import faulthandler
import json
import os
import pickle
import select
import signal
import socket
import warnings
import weakref
from contextlib import suppress

SECONDS = 10     # of computing, for one answer
MEMORY = 2**30   # bytes beside what the process begins with


class Exceeds(ValueError):
    """A limit was reached."""


class Apart:
    """ask(name, *args) -> the attribute of this name of make(*given), or what it returns for args,
    as JSON has it. what: the name of all that, for errors. Raises ValueError, in one line, as make
    and the object do, and Exceeds."""

    def __init__(self, make, *given, what):
        self.make, self.given, self.what, self.owner = make, given, what, None
        self.ask(None)  # is it made?

    def ask(self, name, *args):
        if not hasattr(os, "fork"):
            self.made = self.made if self.owner else self.make(*self.given)
            self.owner = os.getpid()
            return json.loads(answer(self.made, name, args))
        if self.owner != os.getpid():  # at first, and after a fork
            self.start()
        reply = b""
        with suppress(ConnectionError):
            send(self.socket, pickle.dumps((name, args)))
            reply = receive(self.socket)
        if not reply:
            self.owner = None
            self.end.detach()
            how = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            limit = f"{SECONDS} s of computing"
            if how != -signal.SIGPROF:
                limit = f"{MEMORY / 2**30:.0f} GB of memory, or broke ({how})"
            raise Exceeds(f"{self.what} takes more than {limit}")
        if reply[:1] == b"!":
            raise ValueError(reply[1:].decode())
        return json.loads(reply[1:])

    def start(self):
        self.socket, theirs = socket.socketpair()
        self.owner = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's threads wait
            self.pid = os.fork()
        if not self.pid:
            self.socket.close()
            with suppress(BaseException):
                serve(theirs, self.owner, self.make, self.given)
            os._exit(1)
        theirs.close()
        self.end = weakref.finalize(self, end, self.pid, self.owner)


def end(pid, owner):
    if owner == os.getpid():
        with suppress(OSError):  # it has ended
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def send(connection, data):
    connection.sendall(len(data).to_bytes(8, "little") + data)


def receive(connection):
    """What was sent; nothing where the other side has ended."""
    data, size = bytearray(), None
    while size is None or len(data) < size:
        more = connection.recv(2**20)
        if not more:
            return b""
        data += more
        if size is None and len(data) >= 8:
            size = 8 + int.from_bytes(data[:8], "little")
    return bytes(data[8:])


# in the child

def serve(connection, parent, make, given):
    """Answer what the parent asks until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with its parent
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    faulthandler.disable()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    limit_memory()
    made = None
    while True:
        while not select.select([connection], [], [], 5)[0]:
            if os.getppid() != parent:
                return
        name, args = pickle.loads(receive(connection))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            if made is None:
                made = make(*given)
            reply = b"=" + answer(made, name, args).encode()
        except Exception as error:  # whatever a program from outside leads to
            text = " ".join(str(error).split()) or type(error).__name__
            reply = b"!" + text.encode("utf-8", "replace")
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(connection, reply)


def answer(made, name, args):
    if name is None:
        return "null"
    found = getattr(made, name)
    return json.dumps(found(*args) if callable(found) else found, default=list)


def limit_memory():
    with suppress(OSError, ImportError, ValueError):
        import resource
        with open("/proc/self/statm") as f:
            limit = int(f.read().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
