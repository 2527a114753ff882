"""Commands for inventors of methods: judge, new."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from fadamgc.cli.console import argument, option, say, terminal

app = typer.Typer()


@app.command()
def judge(
    method: Annotated[str, argument("my_file.py:MyMethod, my_module:MyMethod, or a name of `fadamgc list`.")],
    quick: Annotated[bool, option("Only the checks and the invariants, a few seconds.", "--quick")] = False,
    as_json: Annotated[bool, option("Print the verdict as JSON.", "--json")] = False,
) -> None:
    """Judge a method: is it sound, which invariants hold, is it exact, how does it compare on digits?

    Takes about two minutes. The exit code is 1 if a check fails.
    """
    from fadamgc.judge.verdict import find_method
    from fadamgc.judge.verdict import judge as judge_method

    with redirect_stdout(sys.stderr):  # what a method prints does not belong to the verdict
        verdict = judge_method(find_method(method), quick, say)
    if as_json:
        print(verdict.to_json())
    else:
        verdict.show(terminal())
    if not verdict.sound:
        raise typer.Exit(1)


@app.command()
def new(
    name: Annotated[str, argument("Name of the method, written like a module: my_method.")],
    folder: Annotated[Path, option("Where to write the files.", default="here")] = Path(),
    test: Annotated[bool, typer.Option(help="Whether to write a test file, too.")] = True,
) -> None:
    """Write a skeleton of a method and its test, ready to run and to change."""
    from fadamgc.judge.new import new_method

    paths = new_method(name, folder, test)
    class_name = "".join(word.capitalize() for word in name.split("_"))
    say(f"wrote {' and '.join(map(str, paths))}")
    run_test = f"pytest {paths[1]}   and   " if test else ""
    say(f"try: {run_test}fadamgc judge {paths[0]}:{class_name}")
