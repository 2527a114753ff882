"""Start ClientApps in processes in which Flower and torch are already imported.

    python -P preloaded.py serve FOLDER MODULES      a server that forks, next to a SuperNode
    python -I -S preloaded.py ask FOLDER [options of flwr-clientapp]

Flower's SuperExec starts one process per message, with the command ``flwr-clientapp`` that it finds in $PATH.
Importing Flower and torch takes most of the time of such a process. So ``launch.py`` starts a server, which
imports MODULES once, and puts FOLDER first in the $PATH of the SuperExec. The command ``flwr-clientapp`` in
that folder asks the server to fork a process, which runs Flower's own command with the same options.

Every message still has its own process, and the server itself runs nothing but imports: nothing that an app
does stays for the next message. If no server answers, Flower's own command is started as usual.

This file is a script that does not import fadamgc, so that asking takes a few milliseconds.
"""

from __future__ import annotations

import gc
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib import import_module
from pathlib import Path

COMMAND = "flwr-clientapp"
FUNCTION = "flwr.supernode.cli:flwr_clientapp"  # what Flower's command calls
VARIABLE = "FADAMGC_PRELOAD"  # names of modules to import, with commas; empty: no server
MODULES = "fadamgc.flower.dataset_apps,fadamgc.sim.executors.trainer"
SOCKET = "socket"
SECONDS = 1.0  # between two checks whether the SuperNode still runs


def start() -> str | None:
    """Start a server that ends with this process; return its folder, or None if there is to be none."""
    modules = os.environ.get(VARIABLE, MODULES)
    if not modules or sys.platform != "linux":
        return None
    folder = Path(tempfile.mkdtemp(prefix="fadamgc-"))  # only its owner can enter it
    write_command(folder)
    server = [sys.executable, "-P", __file__, "serve", str(folder), modules]
    subprocess.Popen(server, stdin=subprocess.DEVNULL)
    return str(folder)


def write_command(folder: Path) -> None:
    """Write the command that asks the server of a folder."""
    words = [sys.executable, "-I", "-S", __file__, "ask", str(folder)]
    (folder / COMMAND).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    (folder / COMMAND).chmod(0o700)


def serve(folder: Path, modules: list[str]) -> list[str] | None:
    """Import modules, and fork a process for everybody who asks, until the parent of this process ends.

    Return the options of a request in the forked process, and None in the server at its end.
    """
    parent = os.getppid()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / SOCKET))
        server.listen(128)  # before the imports: those who ask early wait
        for name in modules:
            import_module(name)
        gc.freeze()
        server.settimeout(SECONDS)
        while os.getppid() == parent:
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            with suppress(OSError, ValueError):
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(10 * SECONDS)
                    options = json.loads(connection.makefile().readline())
                    if not os.fork():
                        return [str(option) for option in options]
                    connection.sendall(b"ok\n")
    return None


def ask(folder: Path, options: list[str]) -> bool:
    """Ask the server to run the command with these options; return whether it does."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(folder / SOCKET))
            connection.sendall(json.dumps(options).encode() + b"\n")
            return connection.makefile().readline() == "ok\n"
    except OSError:
        return False


def main(kind: str, folder: Path, *words: str) -> None:
    """Run the server, or the command that asks it."""
    if kind == "ask":
        if not ask(folder, [*words]):
            paths = [path for path in os.environ["PATH"].split(os.pathsep) if path != str(folder)]
            os.environ["PATH"] = os.pathsep.join(paths)
            os.execvp(COMMAND, [COMMAND, *words])
        return
    modules, function = words[0], words[1] if len(words) > 1 else FUNCTION
    module, _, name = function.partition(":")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    owner = os.getpid()
    try:
        options = serve(folder, [module, *modules.split(",")])
    finally:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)
    if options is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if "numpy" in sys.modules:
            sys.modules[
                "numpy"
            ].random.seed()  # Python seeds its random numbers again in a fork, numpy does not
        sys.argv = [COMMAND, *options]
        sys.exit(getattr(import_module(module), name)())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
