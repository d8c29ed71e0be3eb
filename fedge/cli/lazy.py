"""Commands that are loaded when they are called: `fedge --help` lists them without waiting for torch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click
import typer
from typer.core import TyperGroup

LOOK: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": "rich"}


class Later(click.Command):
    """A command whose name and first line are known; the rest is at `place`, "module:name".

    There, a function is a command and a Typer is a group of commands.
    """

    def __init__(self, name: str, line: str, place: str, epilog: str | None = None) -> None:
        super().__init__(name, help=line, epilog=epilog)
        self.place = place

    def load(self) -> click.Command:
        module, name = self.place.split(":")
        found = getattr(import_module(module), name)
        if isinstance(found, typer.Typer):
            return typer.main.get_group(found)
        alone = typer.Typer(**LOOK)
        alone.command(self.name, epilog=self.epilog)(found)
        return typer.main.get_command(alone)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        return self.load().make_context(info_name, args, parent, **extra)


def group(commands: Sequence[Later]) -> type[TyperGroup]:
    """The class of a group that has these commands, in this order."""

    class Group(TyperGroup):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.suggest_commands = False  # click names the nearest command itself
            self.commands.update({command.name or "": command for command in commands})

    return Group
