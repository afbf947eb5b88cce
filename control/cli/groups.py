"""Groups of commands with one that is meant when none is named: `opificia egress SESSION` beside `opificia egress check`."""

import typer
from typer.core import TyperGroup


class DefaultGroup(TyperGroup):
    """Takes the first argument for the argument of its command `show`, unless it is a command's name."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # click's own type
        """Put `show` before arguments that name no command; a session that is called like one is reached by `show`."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["show", *args]
        return super().parse_args(ctx, args)
