"""The command fadamgc, in this process and as a shell starts it."""

from __future__ import annotations

import signal
import subprocess
import sys

from typer.testing import CliRunner

from fadamgc.cli.main import app


def fadamgc(*words: object):
    """Run the command in this process. Whatever happens, the user sees no traceback."""
    result = CliRunner().invoke(app, list(map(str, words)))
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def process(*words: object, **options: object) -> subprocess.Popen[str]:
    """Start the command in another process."""
    command = [sys.executable, "-c", "from fadamgc.cli.main import main; main()", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes | options)


def hear_interrupts() -> None:
    """Receive Ctrl-C as in a terminal; a process that a shell started in the background would ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
