"""`--help` of every command answers at once: what it takes stands apart from what it does, which needs torch."""

import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module

import click
import pytest

from fedge.cli.app import COMMANDS
from fedge.cli.commands import attack, bench, partition, run
from fedge.cli.lazy import Later

ALL_HELP = """
import contextlib, io, sys
from fedge.cli.app import app
for words in {every}:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        app([*words, "--help"], standalone_mode=False, prog_name="fedge")
    assert "Usage" in said.getvalue(), words
    slow = {{"torch", "numpy"}} & set(sys.modules)
    assert not slow, f"fedge {{' '.join(words)}} --help loads {{slow}}"
"""


def all_words() -> Iterator[tuple[str, ...]]:
    for command in COMMANDS:
        assert command.name is not None
        yield (command.name,)
        found = command.load()
        if isinstance(found, click.Group):
            yield from ((command.name, name) for name in found.commands)


def test_no_help_loads_torch() -> None:
    code = ALL_HELP.format(every=[(), *all_words()])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_command_hands_on_what_it_takes_in_the_order_of_what_does_it(command: Later) -> None:
    shell = import_module(command.place.split(":")[0])
    does = import_module(command.place.split(":")[0].replace(".commands", ""))
    ours = {name: one for name, one in vars(shell).items() if _is_command(one, shell.__name__)}
    assert ours
    for name, one in ours.items():
        assert list(inspect.signature(one).parameters) == list(inspect.signature(getattr(does, name)).parameters)
        (call,) = re.findall(rf"work\.{name}\((.*?)\)", inspect.getsource(one), re.DOTALL)
        assert re.findall(r"\w+", call) == list(inspect.signature(one).parameters)


def _is_command(one: object, module: str) -> bool:
    return inspect.isfunction(one) and one.__module__ == module and not one.__name__.startswith("_")


def test_help_names_what_there_is() -> None:
    from fedge.attacks import KINDS
    from fedge.attacks.study import DEFENCES, MEAN, RECOMMENDED
    from fedge.bench import WORKLOADS
    from fedge.cli.partition import CLIENTS
    from fedge.engine.ranks.process_group import TIMEOUT

    assert tuple(KINDS) == attack.KINDS
    assert tuple(DEFENCES) == attack.DEFENCES
    assert attack.USUAL == (MEAN, RECOMMENDED)
    assert {name: one.title for name, one in WORKLOADS.items()} == bench.WORKLOADS
    assert _default(run.run, "rank_timeout") == TIMEOUT
    assert _default(partition.show, "clients") == CLIENTS


def _default(command: Callable[..., None], name: str) -> object:
    return inspect.signature(command).parameters[name].default
