"""A click command with subcommands, each with a help of its own."""

from __future__ import annotations

from typing import Any

import click


class CommandGroup(click.Group):
    """`example`: a call of one of the subcommands, shown if the user names none."""

    def __init__(self, *args: Any, example: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._example = example

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args:
            named = self._example.split()[0]
            others = ", ".join(name for name in self.commands if name != named)
            raise click.UsageError(
                f"which command? Write: {ctx.command_path} {self._example}; there are also {others}"
            )
        return super().parse_args(ctx, args)

    def get_help(self, ctx: click.Context) -> str:
        """Return the help, as wide as the terminal."""
        from .help_screen import help_of

        return help_of(self, ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = super().get_command(ctx, cmd_name)
        if found is None and not ctx.resilient_parsing:
            names = ", ".join(self.commands)
            import difflib

            near = difflib.get_close_matches(cmd_name.lower(), self.commands, n=1)
            hint = f"did you mean {near[0]}? There are {names}" if near else f"write {names}"
            raise click.UsageError(f"{ctx.command_path} has no command {cmd_name!r}; {hint}")
        return found

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order in which they were made
