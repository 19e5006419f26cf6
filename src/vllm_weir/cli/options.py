"""Options of commands, as the words of a command line."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

from vllm_weir.errors import WeirError

HELP = {"help_option_names": ["-h", "--help"]}
"""Settings of every command: how it is asked for help."""


class Commands(TyperGroup):
    """The commands; ``--version`` may also stand after one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        after_a_command = args[:1] and args[0] in self.commands and args[-1] == "--version"
        return super().parse_args(ctx, args[-1:] if after_a_command else args)


class ModelFirst(TyperCommand):
    """A command whose first argument is the model; ``--model MODEL`` and ``-m MODEL`` say it, too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of the command line."""
        rest = list(args)
        models: list[str] = []
        for option in ("--model", "-m"):
            rest, given = take(option, rest, "a model")
            models += given
        return super().parse_args(ctx, [*models, *rest])


def take(option: str, arguments: list[str], expected: str, several: bool = False) -> tuple[list[str], list[str]]:
    """Return the arguments without an option, and the values that it had; it may take `several` at once."""
    rest: list[str] = []
    values: list[str] = []
    taking = False
    remaining = iter(arguments)
    for argument in remaining:
        if argument == option:
            values.append(next(remaining, ""))
            taking = several
        elif taking and not argument.startswith("-"):
            values.append(argument)
        elif argument.startswith(f"{option}="):
            values.append(argument.removeprefix(f"{option}="))
        else:
            taking = False
            rest.append(argument)
    if not all(value.strip() for value in values):
        raise WeirError(f"expected {expected}, got nothing", option)
    return rest, values
